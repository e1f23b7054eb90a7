# Types of the extension module; its docstrings have the meanings. The enum members are those of all
# oneDNN versions up to 3.12: which of them exist depends on the headers of the build.
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, SupportsIndex, TypeAlias, overload

import numpy
import numpy.typing

DNNL_GRAPH_UNKNOWN_DIM: int
DNNL_GRAPH_UNKNOWN_NDIMS: int

class _DLPack(Protocol):
    def __dlpack__(self) -> Any: ...

_Memory: TypeAlias = SupportsIndex | numpy.ndarray[Any, Any] | _DLPack
_AttrValue: TypeAlias = bool | int | float | str | Sequence[int] | Sequence[float]

class version_t(NamedTuple):
    major: int
    minor: int
    patch: int
    hash: str

class status:
    __members__: ClassVar[dict[str, status]]
    success: ClassVar[status]
    out_of_memory: ClassVar[status]
    invalid_arguments: ClassVar[status]
    unimplemented: ClassVar[status]
    last_impl_reached: ClassVar[status]
    runtime_error: ClassVar[status]
    not_required: ClassVar[status]
    invalid_graph: ClassVar[status]
    invalid_graph_op: ClassVar[status]
    invalid_shape: ClassVar[status]
    invalid_data_type: ClassVar[status]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class fpmath_mode:
    __members__: ClassVar[dict[str, fpmath_mode]]
    strict: ClassVar[fpmath_mode]
    bf16: ClassVar[fpmath_mode]
    f16: ClassVar[fpmath_mode]
    tf32: ClassVar[fpmath_mode]
    any: ClassVar[fpmath_mode]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class graph_dump_mode:
    __members__: ClassVar[dict[str, graph_dump_mode]]
    none: ClassVar[graph_dump_mode]
    subgraph: ClassVar[graph_dump_mode]
    graph: ClassVar[graph_dump_mode]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class error(RuntimeError):
    status: status

class engine:
    class kind:
        __members__: ClassVar[dict[str, engine.kind]]
        any: ClassVar[engine.kind]
        cpu: ClassVar[engine.kind]
        gpu: ClassVar[engine.kind]
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        def __index__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object) -> bool: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    any: ClassVar[engine.kind]
    cpu: ClassVar[engine.kind]
    gpu: ClassVar[engine.kind]
    def __init__(self, kind: engine.kind, index: SupportsIndex = 0) -> None: ...
    def get_kind(self) -> engine.kind: ...
    @staticmethod
    def get_count(kind: engine.kind) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class stream:
    class flags:
        __members__: ClassVar[dict[str, stream.flags]]
        in_order: ClassVar[stream.flags]
        out_of_order: ClassVar[stream.flags]
        default_flags: ClassVar[stream.flags]
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        def __index__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object) -> bool: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    in_order: ClassVar[stream.flags]
    out_of_order: ClassVar[stream.flags]
    default_flags: ClassVar[stream.flags]
    def __init__(self, engine: engine, flags: stream.flags | int = ...) -> None: ...
    def wait(self) -> stream: ...
    def get_engine(self) -> engine: ...

class allocator:
    def __init__(self, host_malloc: Any = None, host_free: Any = None) -> None: ...

class logical_tensor:
    class data_type:
        __members__: ClassVar[dict[str, logical_tensor.data_type]]
        undef: ClassVar[logical_tensor.data_type]
        f16: ClassVar[logical_tensor.data_type]
        bf16: ClassVar[logical_tensor.data_type]
        f32: ClassVar[logical_tensor.data_type]
        s32: ClassVar[logical_tensor.data_type]
        s8: ClassVar[logical_tensor.data_type]
        u8: ClassVar[logical_tensor.data_type]
        boolean: ClassVar[logical_tensor.data_type]
        f8_e5m2: ClassVar[logical_tensor.data_type]
        f8_e4m3: ClassVar[logical_tensor.data_type]
        s4: ClassVar[logical_tensor.data_type]
        u4: ClassVar[logical_tensor.data_type]
        s64: ClassVar[logical_tensor.data_type]
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        def __index__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object) -> bool: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    class layout_type:
        __members__: ClassVar[dict[str, logical_tensor.layout_type]]
        undef: ClassVar[logical_tensor.layout_type]
        any: ClassVar[logical_tensor.layout_type]
        strided: ClassVar[logical_tensor.layout_type]
        opaque: ClassVar[logical_tensor.layout_type]
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        def __index__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object) -> bool: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    class property_type:
        __members__: ClassVar[dict[str, logical_tensor.property_type]]
        undef: ClassVar[logical_tensor.property_type]
        variable: ClassVar[logical_tensor.property_type]
        constant: ClassVar[logical_tensor.property_type]
        host_scalar: ClassVar[logical_tensor.property_type]
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        def __index__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object) -> bool: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    f16: ClassVar[logical_tensor.data_type]
    bf16: ClassVar[logical_tensor.data_type]
    f32: ClassVar[logical_tensor.data_type]
    s32: ClassVar[logical_tensor.data_type]
    s8: ClassVar[logical_tensor.data_type]
    u8: ClassVar[logical_tensor.data_type]
    boolean: ClassVar[logical_tensor.data_type]
    f8_e5m2: ClassVar[logical_tensor.data_type]
    f8_e4m3: ClassVar[logical_tensor.data_type]
    s4: ClassVar[logical_tensor.data_type]
    u4: ClassVar[logical_tensor.data_type]
    s64: ClassVar[logical_tensor.data_type]
    any: ClassVar[logical_tensor.layout_type]
    strided: ClassVar[logical_tensor.layout_type]
    opaque: ClassVar[logical_tensor.layout_type]
    variable: ClassVar[logical_tensor.property_type]
    constant: ClassVar[logical_tensor.property_type]
    host_scalar: ClassVar[logical_tensor.property_type]
    @overload
    def __init__(self, other: logical_tensor, /) -> None: ...
    @overload
    def __init__(
        self,
        tid: SupportsIndex,
        dtype: logical_tensor.data_type,
        ltype: logical_tensor.layout_type = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        tid: SupportsIndex,
        dtype: logical_tensor.data_type,
        ndims: int,
        ltype: logical_tensor.layout_type,
        ptype: logical_tensor.property_type = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        tid: SupportsIndex,
        dtype: logical_tensor.data_type,
        dims: Sequence[int] | numpy.typing.NDArray[Any],
        ltype: logical_tensor.layout_type,
        ptype: logical_tensor.property_type = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        tid: SupportsIndex,
        dtype: logical_tensor.data_type,
        dims: Sequence[int] | numpy.typing.NDArray[Any],
        strides: Sequence[int],
        ptype: logical_tensor.property_type = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        tid: SupportsIndex,
        dtype: logical_tensor.data_type,
        dims: Sequence[int] | numpy.typing.NDArray[Any],
        lid: int,
        ptype: logical_tensor.property_type = ...,
    ) -> None: ...
    def get_id(self) -> int: ...
    def get_data_type(self) -> logical_tensor.data_type: ...
    def get_layout_type(self) -> logical_tensor.layout_type: ...
    def get_property_type(self) -> logical_tensor.property_type: ...
    def get_layout_id(self) -> int: ...
    def get_dims(self) -> list[int]: ...
    def get_strides(self) -> list[int]: ...
    def get_mem_size(self) -> int: ...
    def is_equal(self, lt: logical_tensor) -> bool: ...
    def __copy__(self) -> logical_tensor: ...
    def __deepcopy__(self, memo: Any) -> logical_tensor: ...

class op:
    class kind:
        __members__: ClassVar[dict[str, op.kind]]
        Abs: ClassVar[op.kind]
        AbsBackward: ClassVar[op.kind]
        Add: ClassVar[op.kind]
        AvgPool: ClassVar[op.kind]
        AvgPoolBackward: ClassVar[op.kind]
        BatchNormForwardTraining: ClassVar[op.kind]
        BatchNormInference: ClassVar[op.kind]
        BatchNormTrainingBackward: ClassVar[op.kind]
        BiasAdd: ClassVar[op.kind]
        BiasAddBackward: ClassVar[op.kind]
        Clamp: ClassVar[op.kind]
        ClampBackward: ClassVar[op.kind]
        Concat: ClassVar[op.kind]
        Convolution: ClassVar[op.kind]
        ConvolutionBackwardData: ClassVar[op.kind]
        ConvolutionBackwardWeights: ClassVar[op.kind]
        ConvTranspose: ClassVar[op.kind]
        ConvTransposeBackwardData: ClassVar[op.kind]
        ConvTransposeBackwardWeights: ClassVar[op.kind]
        Dequantize: ClassVar[op.kind]
        Divide: ClassVar[op.kind]
        DynamicDequantize: ClassVar[op.kind]
        DynamicQuantize: ClassVar[op.kind]
        Elu: ClassVar[op.kind]
        EluBackward: ClassVar[op.kind]
        End: ClassVar[op.kind]
        Exp: ClassVar[op.kind]
        GELU: ClassVar[op.kind]
        GELUBackward: ClassVar[op.kind]
        HardSigmoid: ClassVar[op.kind]
        HardSigmoidBackward: ClassVar[op.kind]
        HardSwish: ClassVar[op.kind]
        HardSwishBackward: ClassVar[op.kind]
        Interpolate: ClassVar[op.kind]
        InterpolateBackward: ClassVar[op.kind]
        LayerNorm: ClassVar[op.kind]
        LayerNormBackward: ClassVar[op.kind]
        LeakyReLU: ClassVar[op.kind]
        Log: ClassVar[op.kind]
        LogSoftmax: ClassVar[op.kind]
        LogSoftmaxBackward: ClassVar[op.kind]
        MatMul: ClassVar[op.kind]
        Maximum: ClassVar[op.kind]
        MaxPool: ClassVar[op.kind]
        MaxPoolBackward: ClassVar[op.kind]
        Minimum: ClassVar[op.kind]
        Mish: ClassVar[op.kind]
        MishBackward: ClassVar[op.kind]
        Multiply: ClassVar[op.kind]
        Pow: ClassVar[op.kind]
        PReLU: ClassVar[op.kind]
        PReLUBackward: ClassVar[op.kind]
        Quantize: ClassVar[op.kind]
        Reciprocal: ClassVar[op.kind]
        ReduceL1: ClassVar[op.kind]
        ReduceL2: ClassVar[op.kind]
        ReduceMax: ClassVar[op.kind]
        ReduceMean: ClassVar[op.kind]
        ReduceMin: ClassVar[op.kind]
        ReduceProd: ClassVar[op.kind]
        ReduceSum: ClassVar[op.kind]
        ReLU: ClassVar[op.kind]
        ReLUBackward: ClassVar[op.kind]
        Reorder: ClassVar[op.kind]
        Round: ClassVar[op.kind]
        Select: ClassVar[op.kind]
        Sigmoid: ClassVar[op.kind]
        SigmoidBackward: ClassVar[op.kind]
        SoftMax: ClassVar[op.kind]
        SoftMaxBackward: ClassVar[op.kind]
        SoftPlus: ClassVar[op.kind]
        SoftPlusBackward: ClassVar[op.kind]
        Sqrt: ClassVar[op.kind]
        SqrtBackward: ClassVar[op.kind]
        Square: ClassVar[op.kind]
        SquaredDifference: ClassVar[op.kind]
        StaticReshape: ClassVar[op.kind]
        StaticTranspose: ClassVar[op.kind]
        Subtract: ClassVar[op.kind]
        Tanh: ClassVar[op.kind]
        TanhBackward: ClassVar[op.kind]
        TypeCast: ClassVar[op.kind]
        Wildcard: ClassVar[op.kind]
        LastSymbol: ClassVar[op.kind]
        GroupNorm: ClassVar[op.kind]
        GenIndex: ClassVar[op.kind]
        GreaterEqual: ClassVar[op.kind]
        RMSNorm: ClassVar[op.kind]
        Dropout: ClassVar[op.kind]
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        def __index__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object) -> bool: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    class attr:
        __members__: ClassVar[dict[str, op.attr]]
        undef: ClassVar[op.attr]
        alpha: ClassVar[op.attr]
        beta: ClassVar[op.attr]
        epsilon: ClassVar[op.attr]
        max: ClassVar[op.attr]
        min: ClassVar[op.attr]
        momentum: ClassVar[op.attr]
        scales: ClassVar[op.attr]
        axis: ClassVar[op.attr]
        begin_norm_axis: ClassVar[op.attr]
        groups: ClassVar[op.attr]
        axes: ClassVar[op.attr]
        dilations: ClassVar[op.attr]
        dst_shape: ClassVar[op.attr]
        kernel: ClassVar[op.attr]
        order: ClassVar[op.attr]
        output_padding: ClassVar[op.attr]
        pads_begin: ClassVar[op.attr]
        pads_end: ClassVar[op.attr]
        shape: ClassVar[op.attr]
        sizes: ClassVar[op.attr]
        src_shape: ClassVar[op.attr]
        strides: ClassVar[op.attr]
        weights_shape: ClassVar[op.attr]
        zps: ClassVar[op.attr]
        exclude_pad: ClassVar[op.attr]
        keep_dims: ClassVar[op.attr]
        keep_stats: ClassVar[op.attr]
        per_channel_broadcast: ClassVar[op.attr]
        special_zero: ClassVar[op.attr]
        transpose_a: ClassVar[op.attr]
        transpose_b: ClassVar[op.attr]
        use_affine: ClassVar[op.attr]
        use_dst: ClassVar[op.attr]
        auto_broadcast: ClassVar[op.attr]
        auto_pad: ClassVar[op.attr]
        coordinate_transformation_mode: ClassVar[op.attr]
        data_format: ClassVar[op.attr]
        mode: ClassVar[op.attr]
        qtype: ClassVar[op.attr]
        rounding_type: ClassVar[op.attr]
        weights_format: ClassVar[op.attr]
        group_shape: ClassVar[op.attr]
        end: ClassVar[op.attr]
        accumulation_mode: ClassVar[op.attr]
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        def __index__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object) -> bool: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    Abs: ClassVar[op.kind]
    AbsBackward: ClassVar[op.kind]
    Add: ClassVar[op.kind]
    AvgPool: ClassVar[op.kind]
    AvgPoolBackward: ClassVar[op.kind]
    BatchNormForwardTraining: ClassVar[op.kind]
    BatchNormInference: ClassVar[op.kind]
    BatchNormTrainingBackward: ClassVar[op.kind]
    BiasAdd: ClassVar[op.kind]
    BiasAddBackward: ClassVar[op.kind]
    Clamp: ClassVar[op.kind]
    ClampBackward: ClassVar[op.kind]
    Concat: ClassVar[op.kind]
    Convolution: ClassVar[op.kind]
    ConvolutionBackwardData: ClassVar[op.kind]
    ConvolutionBackwardWeights: ClassVar[op.kind]
    ConvTranspose: ClassVar[op.kind]
    ConvTransposeBackwardData: ClassVar[op.kind]
    ConvTransposeBackwardWeights: ClassVar[op.kind]
    Dequantize: ClassVar[op.kind]
    Divide: ClassVar[op.kind]
    DynamicDequantize: ClassVar[op.kind]
    DynamicQuantize: ClassVar[op.kind]
    Elu: ClassVar[op.kind]
    EluBackward: ClassVar[op.kind]
    End: ClassVar[op.kind]
    Exp: ClassVar[op.kind]
    GELU: ClassVar[op.kind]
    GELUBackward: ClassVar[op.kind]
    HardSigmoid: ClassVar[op.kind]
    HardSigmoidBackward: ClassVar[op.kind]
    HardSwish: ClassVar[op.kind]
    HardSwishBackward: ClassVar[op.kind]
    Interpolate: ClassVar[op.kind]
    InterpolateBackward: ClassVar[op.kind]
    LayerNorm: ClassVar[op.kind]
    LayerNormBackward: ClassVar[op.kind]
    LeakyReLU: ClassVar[op.kind]
    Log: ClassVar[op.kind]
    LogSoftmax: ClassVar[op.kind]
    LogSoftmaxBackward: ClassVar[op.kind]
    MatMul: ClassVar[op.kind]
    Maximum: ClassVar[op.kind]
    MaxPool: ClassVar[op.kind]
    MaxPoolBackward: ClassVar[op.kind]
    Minimum: ClassVar[op.kind]
    Mish: ClassVar[op.kind]
    MishBackward: ClassVar[op.kind]
    Multiply: ClassVar[op.kind]
    Pow: ClassVar[op.kind]
    PReLU: ClassVar[op.kind]
    PReLUBackward: ClassVar[op.kind]
    Quantize: ClassVar[op.kind]
    Reciprocal: ClassVar[op.kind]
    ReduceL1: ClassVar[op.kind]
    ReduceL2: ClassVar[op.kind]
    ReduceMax: ClassVar[op.kind]
    ReduceMean: ClassVar[op.kind]
    ReduceMin: ClassVar[op.kind]
    ReduceProd: ClassVar[op.kind]
    ReduceSum: ClassVar[op.kind]
    ReLU: ClassVar[op.kind]
    ReLUBackward: ClassVar[op.kind]
    Reorder: ClassVar[op.kind]
    Round: ClassVar[op.kind]
    Select: ClassVar[op.kind]
    Sigmoid: ClassVar[op.kind]
    SigmoidBackward: ClassVar[op.kind]
    SoftMax: ClassVar[op.kind]
    SoftMaxBackward: ClassVar[op.kind]
    SoftPlus: ClassVar[op.kind]
    SoftPlusBackward: ClassVar[op.kind]
    Sqrt: ClassVar[op.kind]
    SqrtBackward: ClassVar[op.kind]
    Square: ClassVar[op.kind]
    SquaredDifference: ClassVar[op.kind]
    StaticReshape: ClassVar[op.kind]
    StaticTranspose: ClassVar[op.kind]
    Subtract: ClassVar[op.kind]
    Tanh: ClassVar[op.kind]
    TanhBackward: ClassVar[op.kind]
    TypeCast: ClassVar[op.kind]
    Wildcard: ClassVar[op.kind]
    LastSymbol: ClassVar[op.kind]
    GroupNorm: ClassVar[op.kind]
    GenIndex: ClassVar[op.kind]
    GreaterEqual: ClassVar[op.kind]
    RMSNorm: ClassVar[op.kind]
    Dropout: ClassVar[op.kind]
    undef: ClassVar[op.attr]
    alpha: ClassVar[op.attr]
    beta: ClassVar[op.attr]
    epsilon: ClassVar[op.attr]
    max: ClassVar[op.attr]
    min: ClassVar[op.attr]
    momentum: ClassVar[op.attr]
    scales: ClassVar[op.attr]
    axis: ClassVar[op.attr]
    begin_norm_axis: ClassVar[op.attr]
    groups: ClassVar[op.attr]
    axes: ClassVar[op.attr]
    dilations: ClassVar[op.attr]
    dst_shape: ClassVar[op.attr]
    kernel: ClassVar[op.attr]
    order: ClassVar[op.attr]
    output_padding: ClassVar[op.attr]
    pads_begin: ClassVar[op.attr]
    pads_end: ClassVar[op.attr]
    shape: ClassVar[op.attr]
    sizes: ClassVar[op.attr]
    src_shape: ClassVar[op.attr]
    strides: ClassVar[op.attr]
    weights_shape: ClassVar[op.attr]
    zps: ClassVar[op.attr]
    exclude_pad: ClassVar[op.attr]
    keep_dims: ClassVar[op.attr]
    keep_stats: ClassVar[op.attr]
    per_channel_broadcast: ClassVar[op.attr]
    special_zero: ClassVar[op.attr]
    transpose_a: ClassVar[op.attr]
    transpose_b: ClassVar[op.attr]
    use_affine: ClassVar[op.attr]
    use_dst: ClassVar[op.attr]
    auto_broadcast: ClassVar[op.attr]
    auto_pad: ClassVar[op.attr]
    coordinate_transformation_mode: ClassVar[op.attr]
    data_format: ClassVar[op.attr]
    mode: ClassVar[op.attr]
    qtype: ClassVar[op.attr]
    rounding_type: ClassVar[op.attr]
    weights_format: ClassVar[op.attr]
    group_shape: ClassVar[op.attr]
    end: ClassVar[op.attr]
    accumulation_mode: ClassVar[op.attr]
    @overload
    def __init__(self, id: SupportsIndex, kind: op.kind, name: str = "") -> None: ...
    @overload
    def __init__(
        self,
        id: SupportsIndex,
        kind: op.kind,
        inputs: Sequence[logical_tensor],
        outputs: Sequence[logical_tensor],
        name: str = "",
    ) -> None: ...
    def add_input(self, t: logical_tensor) -> None: ...
    def add_inputs(self, ts: Sequence[logical_tensor]) -> None: ...
    def add_output(self, t: logical_tensor) -> None: ...
    def add_outputs(self, ts: Sequence[logical_tensor]) -> None: ...
    def set_attr(self, name: op.attr, value: _AttrValue) -> op: ...
    def get_id(self) -> int: ...
    def get_kind(self) -> op.kind: ...
    def get_name(self) -> str: ...
    def get_inputs(self) -> list[logical_tensor]: ...
    def get_outputs(self) -> list[logical_tensor]: ...
    def get_attrs(self) -> dict[op.attr, bool | int | float | str | list[int] | list[float]]: ...

class tensor:
    def __init__(
        self, lt: logical_tensor, engine: engine, handle: _Memory | None = None
    ) -> None: ...
    @staticmethod
    def make_scalar_tensor(lt: logical_tensor, scalar: float) -> tensor: ...
    def get_data_handle(self) -> int: ...
    def set_data_handle(self, handle: _Memory) -> None: ...
    def get_engine(self) -> engine: ...
    def get_logical_tensor(self) -> logical_tensor: ...
    def numpy(self) -> numpy.ndarray[Any, Any]: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class partition:
    class policy:
        __members__: ClassVar[dict[str, partition.policy]]
        fusion: ClassVar[partition.policy]
        debug: ClassVar[partition.policy]
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        def __index__(self) -> int: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object) -> bool: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    fusion: ClassVar[partition.policy]
    debug: ClassVar[partition.policy]
    def __init__(self, op: op, engine_kind: engine.kind) -> None: ...
    def get_ops_num(self) -> int: ...
    def get_ops(self) -> list[int]: ...
    def get_id(self) -> int: ...
    def is_supported(self) -> bool: ...
    def get_input_ports(self) -> list[logical_tensor]: ...
    def get_output_ports(self) -> list[logical_tensor]: ...
    def get_engine_kind(self) -> engine.kind: ...
    def compile(
        self,
        inputs: Sequence[logical_tensor],
        outputs: Sequence[logical_tensor],
        engine: engine,
    ) -> compiled_partition: ...

class compiled_partition:
    def query_logical_tensor(self, tid: SupportsIndex) -> logical_tensor: ...
    def get_inplace_ports(self) -> list[tuple[int, int]]: ...
    def execute(
        self, stream: stream, inputs: Sequence[tensor], outputs: Sequence[tensor]
    ) -> None: ...

class graph:
    def __init__(self, engine_kind: engine.kind, mode: fpmath_mode | None = None) -> None: ...
    def add_op(self, op: op, allow_exception: bool = True) -> status: ...
    def finalize(self) -> None: ...
    def is_finalized(self) -> bool: ...
    def get_partitions(self, policy: partition.policy = ...) -> list[partition]: ...
    def set_fpmath_mode(self, mode: fpmath_mode, apply_to_int: bool = False) -> None: ...
    def get_fpmath_mode(self) -> tuple[fpmath_mode, bool]: ...
    def get_engine_kind(self) -> engine.kind: ...
    def get_ops(self) -> list[op]: ...

def make_engine_with_allocator(
    kind: engine.kind, index: SupportsIndex, alloc: allocator
) -> engine: ...
def version() -> version_t: ...
def header_version() -> version_t: ...
def get_compiled_partition_cache_capacity() -> int: ...
def set_compiled_partition_cache_capacity(capacity: SupportsIndex) -> None: ...
def get_constant_tensor_cache() -> int: ...
def set_constant_tensor_cache(flag: SupportsIndex) -> None: ...
def get_constant_tensor_cache_capacity(kind: engine.kind) -> int: ...
def set_constant_tensor_cache_capacity(kind: engine.kind, size: SupportsIndex) -> None: ...
def set_dump_mode(modes: graph_dump_mode | int) -> status: ...
