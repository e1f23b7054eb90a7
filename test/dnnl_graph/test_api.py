"""The one-to-one part, class by class: construction, errors, repeated calls."""

import copy
import pickle

import cases
import numpy as np
import pytest
from cases import LT, VERSION

import dnnl_graph as dg
from dnnl_graph import engine, graph, logical_tensor, op, partition, status, stream, tensor

UNKNOWN = dg.DNNL_GRAPH_UNKNOWN_DIM


@pytest.fixture
def eng():
    return engine(engine.cpu, 0)


def test_example_of_the_rfc():
    scope = {}
    exec(  # `import *` is only allowed at module level
        """
from dnnl_graph import *
matmul0 = op(0, op.MatMul, "matmul0")
matmul0.set_attr(op.transpose_a, False)
matmul0.set_attr(op.transpose_b, True)
lt0 = logical_tensor(0, logical_tensor.f32, [64, 1280], logical_tensor.strided,
                     logical_tensor.variable)
lt1 = logical_tensor(1, logical_tensor.f32, [1280, 1280], logical_tensor.strided,
                     logical_tensor.constant)
lt2 = logical_tensor(2, logical_tensor.f32, [64, 1280], logical_tensor.strided,
                     logical_tensor.variable)
matmul0.add_inputs([lt0, lt1])
matmul0.add_output(lt2)
g = graph(engine.cpu)
g.add_op(matmul0, True)
g.finalize()
p = g.get_partitions(partition.fusion)
""",
        scope,
    )
    assert len(scope["p"]) == 1 and scope["p"][0].get_ops() == [0]
    assert "load" not in scope and "compiled_partition" in scope and "status" in scope


def test_engine(eng):
    assert eng.get_kind() == engine.cpu == engine.kind.cpu
    assert engine.get_count(engine.cpu) == 1
    assert eng == engine(engine.cpu) and hash(eng) == hash(engine(engine.cpu))
    assert eng != engine.cpu
    if engine.get_count(engine.gpu) == 0:
        with pytest.raises(dg.error) as e:
            engine(engine.gpu, 0)
        assert e.value.status == status.invalid_arguments


def test_stream(eng):
    s = stream(eng)
    assert s.wait() is s and s.get_engine() == eng
    assert stream(eng, stream.in_order).wait()


def test_allocator(eng):
    other = dg.make_engine_with_allocator(engine.cpu, 0, dg.allocator())
    p = cases.relu_graph().get_partitions()[0]
    c = cases.compile_like(p, eng=other)
    x, y = np.float32([[1, -1, 0], [2, -3, 4]]), np.empty((2, 3), np.float32)
    ins = [tensor(c.query_logical_tensor(0), other, x)]
    c.execute(stream(other), ins, [tensor(c.query_logical_tensor(1), other, y)])
    assert (y == np.maximum(x, 0)).all()


def test_allocator_with_functions():
    import ctypes

    libc = ctypes.CDLL(None)
    calls = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    def malloc(size, alignment):
        calls.append(size)
        libc.aligned_alloc.restype = ctypes.c_void_p
        return libc.aligned_alloc(
            ctypes.c_size_t(max(alignment, 64)), ctypes.c_size_t((size + 127) // 64 * 64)
        )

    free = ctypes.cast(libc.free, ctypes.c_void_p).value
    made = dg.make_engine_with_allocator(engine.cpu, 0, dg.allocator(malloc, free))
    assert made.get_kind() == engine.cpu
    with pytest.raises(ValueError, match="host_free"):
        dg.allocator(malloc)
    with pytest.raises(TypeError, match="host_malloc"):
        dg.allocator("malloc", "free")


@pytest.mark.parametrize(
    ("lt", "dims", "layout", "strides", "ptype"),
    [
        (LT(3, LT.f32), None, "undef", None, "undef"),
        (LT(3, LT.f32, LT.any), None, "any", None, "undef"),
        (LT(3, LT.f32, -1, LT.strided, LT.constant), None, "strided", None, "constant"),
        (LT(3, LT.f32, 2, LT.any), [UNKNOWN] * 2, "any", None, "undef"),
        (LT(3, LT.f32, [2, 3], LT.strided), [2, 3], "strided", [3, 1], "undef"),
        (LT(3, LT.f32, (2, 0, 4), LT.strided), [2, 0, 4], "strided", [4, 4, 1], "undef"),
        (LT(3, LT.f32, [2, 3], [1, 2], LT.variable), [2, 3], "strided", [1, 2], "variable"),
        (LT(3, LT.f32, [2, UNKNOWN], LT.any), [2, UNKNOWN], "any", None, "undef"),
        (LT(3, LT.f32, [], LT.strided), [], "strided", [], "undef"),
        (LT(3, LT.f32, [2, 3], 77), [2, 3], "opaque", None, "undef"),
        (LT(tid=3, dtype=LT.f32, dims=[2], strides=[5], ptype=LT.constant), [2], "strided", [5],
         "constant"),
        (LT(tid=np.int64(3), dtype=LT.f32, dims=np.array([2, 3]), lid=7), [2, 3], "opaque", None,
         "undef"),
    ],
)  # fmt: skip
def test_logical_tensor(lt, dims, layout, strides, ptype):
    for x in (lt, LT(lt), copy.copy(lt), copy.deepcopy(lt)):
        assert x.get_id() == 3 and x.get_data_type() == LT.data_type.f32
        assert x.get_layout_type().name == layout and x.get_property_type().name == ptype
        if dims is None:
            with pytest.raises(dg.error):
                x.get_dims()
        else:
            assert x.get_dims() == dims
        if strides is None:
            with pytest.raises(dg.error) as e:
                x.get_strides()
            assert e.value.status == status.invalid_arguments
        else:
            assert x.get_strides() == strides
        if layout == "opaque":
            assert x.get_layout_id() in (7, 77)
        else:
            with pytest.raises(dg.error):
                x.get_layout_id()
        assert repr(x).startswith("logical_tensor(3, f32, ") and layout in repr(x)


def test_logical_tensor_size_and_equality():
    a = LT(0, LT.f32, [2, 3], LT.strided)
    assert a.get_mem_size() == 24 and LT(0, LT.s8, [2, 3], LT.strided).get_mem_size() == 6
    assert a.is_equal(LT(0, LT.f32, [2, 3], [3, 1]))
    assert not a.is_equal(LT(0, LT.f32, [2, 3], [1, 2]))
    assert not a.is_equal(LT(1, LT.f32, [2, 3], LT.strided))
    assert not a.is_equal(LT(0, LT.f32))
    assert LT(0, LT.f32, [0, 3], LT.strided).get_mem_size() == 0
    if hasattr(LT, "s4"):
        assert LT(0, LT.s4, [3, 3], LT.strided).get_mem_size() == 5


def test_op():
    ins, outs = [LT(0, LT.f32, [2], LT.strided)], [LT(1, LT.f32, [2], LT.strided)]
    a = op(7, op.ReLU, ins, outs, "r")
    assert (a.get_id(), a.get_kind(), a.get_name()) == (7, op.ReLU, "r")
    assert [t.get_id() for t in a.get_inputs() + a.get_outputs()] == [0, 1]
    assert op(7, op.ReLU).get_name() == "ReLU_7"
    assert repr(a) == "op(7, ReLU, 'r')"
    b = op(1, op.Clamp, name="c")
    assert b.set_attr(op.min, 0).set_attr(op.max, np.float32(6.5)) is b
    assert b.get_attrs() == {op.min: 0.0, op.max: 6.5}
    assert isinstance(b.get_attrs()[op.min], float)
    c = op(2, op.Dequantize)
    c.set_attr(op.scales, [1, 2.5]).set_attr(op.zps, np.array([1, 2])).set_attr(op.axis, True + 0)
    c.set_attr(op.qtype, "per_channel")
    assert c.get_attrs()[op.scales] == [1.0, 2.5] and c.get_attrs()[op.zps] == [1, 2]


def test_names_of_op_kinds_and_attributes():
    assert op.MatMul is op.kind.MatMul or op.MatMul == op.kind.MatMul
    assert len(op.kind.__members__) >= 84 and len(op.attr.__members__) >= 40
    if VERSION >= (3, 7):
        assert "GroupNorm" in op.kind.__members__ and "group_shape" in op.attr.__members__


def test_graph():
    g = graph(engine.cpu, dg.fpmath_mode.bf16)
    assert g.get_engine_kind() == engine.cpu and g.get_fpmath_mode()[0] == dg.fpmath_mode.bf16
    assert not g.is_finalized() and g.get_ops() == []
    relu = op(0, op.ReLU, [LT(0, LT.f32, [2], LT.strided)], [LT(1, LT.f32, [2], LT.strided)])
    assert g.add_op(relu) == status.success
    with pytest.raises(ValueError, match="'op' has id 0, which op\\(0, ReLU"):
        g.add_op(relu)
    assert g.add_op(relu, False) == status.invalid_arguments
    with pytest.raises(dg.error) as e:
        g.get_partitions()
    assert e.value.status == status.invalid_graph
    g.finalize()
    g.finalize()
    assert g.is_finalized()
    late = op(1, op.ReLU, [LT(1, LT.f32, [2], LT.strided)], [LT(2, LT.f32, [2], LT.strided)])
    with pytest.raises(dg.error, match="finalized") as e:
        g.add_op(late)
    assert e.value.status == status.invalid_graph
    assert g.add_op(late, False) == status.invalid_graph
    with pytest.raises(dg.error):
        g.set_fpmath_mode(dg.fpmath_mode.any)
    assert len(g.get_partitions()) == len(g.get_partitions(partition.debug)) == 1


def test_graph_is_reentrant():
    g = graph(engine.cpu)
    t = [LT(i, LT.f32, LT.strided) for i in range(4)]
    g.add_op(op(0, op.MatMul, [t[0], t[1]], [t[2]]))
    g.add_op(op(1, op.ReLU, [t[2]], [t[3]]))
    g.finalize()
    assert len(g.get_partitions()) == 1
    assert len(g.get_partitions(partition.debug)) == 2
    assert len(g.get_partitions(partition.fusion)) == 1


def test_graph_copies_the_op():
    g = graph(engine.cpu)
    o = op(0, op.Elu, [LT(0, LT.f32, [2], LT.strided)], [LT(1, LT.f32, [2], LT.strided)])
    o.set_attr(op.alpha, 1)
    g.add_op(o)
    o.set_attr(op.alpha, 2)
    assert g.get_ops()[0].get_attrs() == {op.alpha: 1.0}
    g.get_ops()[0].set_attr(op.alpha, 3)
    assert g.get_ops()[0].get_attrs() == {op.alpha: 1.0}


def test_graph_refuses_what_is_no_graph():
    t = [LT(i, LT.f32, [2], LT.strided) for i in range(3)]
    g = graph(engine.cpu)
    g.add_op(op(0, op.ReLU, [t[0]], [t[1]]))
    with pytest.raises(ValueError, match="writes logical tensor 1"):
        g.add_op(op(1, op.Abs, [t[0]], [t[1]]))
    g.add_op(op(2, op.Abs, [t[1]], [t[0]]))
    with pytest.raises(dg.error, match="cycle"):
        g.finalize()
    g = graph(engine.cpu)
    g.add_op(op(0, op.ReLU, [t[0]], [t[1]]))
    g.add_op(op(1, op.ReLU, [LT(1, LT.f32, [3], LT.strided)], [t[2]]))
    with pytest.raises(dg.error) as e:
        g.finalize()
    assert e.value.status == status.invalid_graph
    with pytest.raises(dg.error) as e:
        graph(engine.cpu).add_op(op(0, op.Convolution, "conv"))
    assert e.value.status == status.invalid_graph_op and "op(0, Convolution, 'conv')" in str(
        e.value
    )
    empty = graph(engine.cpu)
    empty.finalize()
    assert empty.get_partitions() == []


def test_fpmath_mode():
    g = graph(engine.cpu)
    if VERSION < (3, 5):
        with pytest.raises(dg.error) as e:
            g.set_fpmath_mode(dg.fpmath_mode.bf16, True)
        assert e.value.status == status.unimplemented
    else:
        g.set_fpmath_mode(dg.fpmath_mode.bf16, True)
        assert g.get_fpmath_mode() == (dg.fpmath_mode.bf16, True)


def test_partition(eng):
    g = cases.relu_graph()
    (p,) = g.get_partitions()
    assert p.get_ops_num() == 1 and p.get_ops() == [0] and isinstance(p.get_id(), int)
    assert p.is_supported() and p.get_engine_kind() == engine.cpu
    assert [t.get_id() for t in p.get_input_ports() + p.get_output_ports()] == [0, 1]
    single = partition(g.get_ops()[0], engine.cpu)
    assert single.is_supported()
    x = np.float32([[1, -1, 0], [2, -3, 4]])
    y = np.empty_like(x)
    c = cases.compile_like(single)
    c.execute(
        stream(eng),
        [tensor(c.query_logical_tensor(0), eng, x)],
        [tensor(c.query_logical_tensor(1), eng, y)],
    )
    assert (y == np.maximum(x, 0)).all()
    with pytest.raises(dg.error):
        partition(op(0, op.Convolution), engine.cpu)


def test_compiled_partition(eng):
    p = cases.relu_graph().get_partitions()[0]
    c = cases.compile_like(p)
    assert c.query_logical_tensor(1).get_dims() == [2, 3]
    with pytest.raises(dg.error) as e:
        c.query_logical_tensor(9)
    assert e.value.status == status.invalid_arguments
    assert set(c.get_inplace_ports()) <= {(0, 1)}
    assert "compiled_partition(inputs [logical_tensor(0" in repr(c)


def test_tensor(eng):
    lt = LT(0, LT.f32, [2, 3], LT.strided)
    own = tensor(lt, eng)
    assert own.get_data_handle() % 64 == 0 and (own.numpy() == 0).all()
    assert own.get_engine() == eng and own.get_logical_tensor().is_equal(lt)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = tensor(lt, eng, x)
    assert t.get_data_handle() == x.ctypes.data
    by_address = tensor(lt, eng, x.ctypes.data)
    assert (by_address.numpy() == x).all()
    before = t.numpy()
    y = x + 1
    t.set_data_handle(y)
    assert t.get_data_handle() == y.ctypes.data and (before == x).all()
    assert "read-only" not in repr(t)


def test_version_and_caches():
    assert dg.version()[:2] >= (3, 2) and dg.version().major == dg.version()[0]
    assert dg.header_version()[:2] == dg.version()[:2]
    old = dg.get_compiled_partition_cache_capacity()
    dg.set_compiled_partition_cache_capacity(3)
    assert dg.get_compiled_partition_cache_capacity() == 3
    dg.set_compiled_partition_cache_capacity(old)
    with pytest.raises(dg.error):
        dg.set_compiled_partition_cache_capacity(-1)
    with pytest.raises(dg.error):
        dg.set_constant_tensor_cache(-1)
    assert dg.get_constant_tensor_cache() in (0, 1)
    if VERSION < (3, 3):
        with pytest.raises(dg.error) as e:
            dg.get_constant_tensor_cache_capacity(engine.cpu)
        assert e.value.status == status.unimplemented
    else:
        dg.set_constant_tensor_cache_capacity(engine.cpu, 16)
        assert dg.get_constant_tensor_cache_capacity(engine.cpu) == 16
        dg.set_constant_tensor_cache_capacity(engine.cpu, 0)


def test_error_is_a_runtime_error():
    assert issubclass(dg.error, RuntimeError) and isinstance(dg.error.status, status)
    with pytest.raises(dg.error, match=r"\(status: invalid_arguments\)"):
        LT(0, LT.f32).get_dims()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (engine, "get_kind"),
        (stream, "wait"),
        (graph, "finalize"),
        (op, "get_kind"),
        (tensor, "numpy"),
        (partition, "get_ops"),
        (dg.compiled_partition, "get_inplace_ports"),
    ],
)
def test_an_object_without_init_is_empty(kind, method):
    empty = kind.__new__(kind)
    if kind is not op:
        with pytest.raises((TypeError, dg.error)):
            getattr(empty, method)()
    with pytest.raises(TypeError, match=kind.__name__):
        pickle.dumps(empty)
    if kind is not dg.compiled_partition:
        with pytest.raises(TypeError):
            kind(*[object()] * 7)
    uses = {
        engine: lambda: stream(empty),
        stream: lambda: _C.execute(empty, [_T0], [_T1]),
        op: lambda: graph(engine.cpu).add_op(empty),
        tensor: lambda: _C.execute(_S, [empty], [_T1]),
        graph: lambda: dg.run(empty, {}),
    }
    with pytest.raises((TypeError, ValueError, dg.error)):
        uses.get(kind, lambda: repr(empty))()


def test_a_logical_tensor_without_init_is_empty():
    empty = logical_tensor.__new__(logical_tensor)
    assert empty.get_id() == 0 and empty.get_data_type() == LT.data_type.undef
    with pytest.raises(ValueError, match=r"has no data type|data type undef"):
        _P.compile([empty], [_L1], _E)


def _lt(*a, **k):
    return lambda: LT(*a, **k)


def _attr(name, value):
    return lambda: op(0, op.Wildcard).set_attr(name, value)


_F = LT.f32
_R = cases.relu_graph()
_P = _R.get_partitions()[0]
_E = engine(engine.cpu, 0)
_C = cases.compile_like(_P)
_S = stream(_E)
_L0, _L1 = _C.query_logical_tensor(0), _C.query_logical_tensor(1)
_T0, _T1 = tensor(_L0, _E), tensor(_L1, _E)
_RO = np.zeros((2, 3), np.float32)
_RO.setflags(write=False)
_SMALL = np.zeros((2, 2), np.float32)

BAD = [
    # (call, exception, what the message has to name)
    (_lt("0", _F), TypeError, "'tid' must be an int"),
    (_lt(-1, _F), ValueError, "'tid'"),
    (_lt(2**64, _F), ValueError, "'tid'"),
    (_lt(True, _F), TypeError, "'tid'"),
    (_lt(0, "f32"), TypeError, "'dtype' must be a logical_tensor.data_type"),
    (_lt(0), TypeError, "'dtype' is missing"),
    (_lt(0, _F, [2, -3], LT.strided), ValueError, "'dims' must hold values >= 0"),
    (_lt(0, _F, [2, 3.5], LT.strided), TypeError, "'dims' must be a list of only int"),
    (_lt(0, _F, "23", LT.strided), TypeError, "ndims, dims or ltype"),
    (_lt(0, _F, [1] * 13, LT.strided), ValueError, "'dims' has 13 entries"),
    (_lt(0, _F, [2**40, 2**40], LT.strided), ValueError, "'dims' describes more"),
    (_lt(0, _F, 13, LT.strided), ValueError, "'ndims'"),
    (_lt(0, _F, -2, LT.strided), ValueError, "'ndims'"),
    (_lt(0, _F, [2, 3]), TypeError, "'ltype', 'strides' or 'lid' is missing"),
    (_lt(0, _F, [2, 3], LT.opaque), ValueError, "'ltype' cannot be opaque"),
    (_lt(0, _F, [2, 3], [1]), ValueError, "'strides' must be as long as dims"),
    (_lt(0, _F, [2, 3], [-1, 1]), ValueError, "'strides'"),
    (_lt(0, _F, [2**20, 3], [2**62, 1]), ValueError, "'strides' reach"),
    (_lt(0, _F, [2, 3], LT.strided, LT.strided), TypeError, "'ptype'"),
    (_lt(0, _F, [2], LT.strided, lid=4), TypeError, "'lid' given twice"),
    (_lt(0, _F, [2], LT.strided, shape=4), TypeError, "unknown argument 'shape'"),
    (_lt(0, _F, 2, 5), TypeError, "'lid' needs argument 'dims'"),
    (lambda: LT(0, _F, -1, LT.strided).get_mem_size(), ValueError, "'self' has unknown sizes"),
    (lambda: LT(0, _F, [2], 12345).get_mem_size(), ValueError, "'self' has layout id 12345"),
    (lambda: _L0.is_equal(LT(0, _F, [2, 3], 999)), ValueError, "'lt' has layout id 999"),
    (lambda: _L0.is_equal(3), TypeError, "'lt' must be a logical_tensor"),
    (lambda: op("a", op.ReLU), TypeError, "op: argument 'id'"),
    (lambda: op(0, "ReLU"), TypeError, "'kind' must be an op.kind"),
    (lambda: op(0, op.kind.LastSymbol), ValueError, "'kind'"),
    (lambda: op(0, op.ReLU, [_L0]), TypeError, "'outputs' is missing"),
    (lambda: op(0, op.ReLU, [3], [_L0]), TypeError, "'inputs' must be a list of only"),
    (lambda: op(0, op.ReLU, [], [_L0, _L0]), ValueError, "'outputs' has id 0"),
    (lambda: op(0, op.ReLU, "a\0b"), ValueError, "'name'"),
    (lambda: op(0, op.ReLU, name=3), TypeError, "'name' must be a str"),
    (lambda: op(0, op.ReLU).add_input(3), TypeError, "'t' must be a logical_tensor"),
    (lambda: op(0, op.ReLU).add_inputs(_L0), TypeError, "'ts' must be a list"),
    (_attr("alpha", 1.0), TypeError, "'name' must be an op.attr"),
    (_attr(op.attr.undef, 1), ValueError, "'name' must be a real attribute"),
    (_attr(op.alpha, "x"), TypeError, "'value' must be float for attribute alpha"),
    (_attr(op.alpha, True), TypeError, "float for attribute alpha"),
    (_attr(op.alpha, 1e300), ValueError, "32-bit float"),
    (_attr(op.axis, 1.5), TypeError, "int for attribute axis"),
    (_attr(op.axis, 2**70), ValueError, "64-bit"),
    (_attr(op.keep_dims, 2), TypeError, "bool for attribute keep_dims"),
    (_attr(op.strides, 1), TypeError, "list of int for attribute strides"),
    (_attr(op.strides, [1, "a"]), TypeError, "list of int for attribute strides"),
    (_attr(op.strides, []), ValueError, "must not be empty for attribute strides"),
    (_attr(op.strides, [0, 1]), ValueError, "must be positive for attribute strides"),
    (_attr(op.groups, 0), ValueError, "must be positive for attribute groups"),
    (_attr(op.scales, "abc"), TypeError, "list of float for attribute scales"),
    (_attr(op.mode, b"x"), TypeError, "str for attribute mode"),
    (_attr(op.mode, ""), ValueError, "must not be empty for attribute mode"),
    (lambda: graph("cpu"), TypeError, "'engine_kind'"),
    (lambda: graph(engine.cpu, "bf16"), TypeError, "'mode'"),
    (lambda: graph(engine.cpu).add_op(3), TypeError, "'op' must be an op"),
    (lambda: _R.get_partitions("fusion"), TypeError, "'policy'"),
    (lambda: engine("cpu"), TypeError, "'kind'"),
    (lambda: engine(engine.cpu, -1), ValueError, "'index'"),
    (lambda: stream(engine.cpu), TypeError, "'engine' must be an engine"),
    (lambda: partition(_R, engine.cpu), TypeError, "'op' must be an op"),
    (lambda: _P.compile([], [_L1], _E), ValueError, "'inputs' lacks a logical tensor with id 0"),
    (lambda: _P.compile([_L0], [], _E), ValueError, "'outputs' lacks a logical tensor with id 1"),
    (lambda: _P.compile([_L0, _L1], [_L1], _E), ValueError, "'inputs' has id 1"),
    (lambda: _P.compile(_L0, [_L1], _E), TypeError, "'inputs' must be a list"),
    (lambda: _P.compile([_L0], [_L1], None), TypeError, "'engine'"),
    (lambda: _P.compile([LT(0, LT.s8, [2, 3], LT.strided)], [_L1], _E), ValueError, "data type s8"),
    (lambda: _P.compile([LT(0, _F, [2], LT.strided)], [_L1], _E), ValueError, "1 dimensions"),
    (lambda: _P.compile([LT(0, _F, 2, LT.strided)], [_L1], _E), ValueError, "unknown sizes"),
    (lambda: _P.compile([LT(0, _F, [2, 3], 555)], [_L1], _E), ValueError, "layout id 555"),
    (lambda: _P.compile([LT(0, _F)], [_L1], _E), ValueError, "has no layout type"),
    (
        lambda: _P.compile([_L0, LT(0, _F, [2, 3], [1, 2])], [_L1], _E),
        ValueError,
        "id 0 twice",
    ),
    (lambda: _C.execute(_S, [], [_T1]), ValueError, "'inputs' lacks a tensor with id 0"),
    (lambda: _C.execute(_S, [_T0], []), ValueError, "'outputs' lacks a tensor with id 1"),
    (lambda: _C.execute(_S, [_T1], [_T0]), ValueError, "'inputs' has a tensor with id 1"),
    (lambda: _C.execute(_S, [_T0, tensor(_L0, _E)], [_T1]), ValueError, "two different tensors"),
    (lambda: _C.execute(_E, [_T0], [_T1]), TypeError, "'stream'"),
    (lambda: _C.execute(_S, [_RO], [_T1]), TypeError, "'inputs' must be a list of only tensor"),
    (lambda: _C.execute(_S, [_T0], [tensor(_L1, _E, _RO)]), ValueError, "read-only"),
    (lambda: _C.execute(_S, [tensor(_L0, _E, 0)], [_T1]), ValueError, "without memory"),
    (
        lambda: _C.execute(_S, [tensor(LT(0, _F, [2, 2], LT.strided), _E)], [_T1]),
        ValueError,
        r"\[2, 2\]",
    ),
    (
        lambda: _C.execute(_S, [tensor(LT(0, _F, [2, 3], [1, 2]), _E)], [_T1]),
        ValueError,
        "strided",
    ),
    (lambda: tensor(_L0, _E, _SMALL), ValueError, r"'handle' must have shape \[2, 3\]"),
    (lambda: tensor(_L0, _E, np.zeros((2, 3))), TypeError, "element type float32"),
    (lambda: tensor(_L0, _E, np.zeros((3, 2), _RO.dtype).T), ValueError, "is it contiguous"),
    (lambda: tensor(_L0, _E, np.zeros((2, 3), ">f4")), ValueError, "byte order"),
    (lambda: tensor(_L0, _E, [1.0]), TypeError, "'handle' must be an address"),
    (lambda: tensor(_L0, _E, -1), ValueError, "'handle'"),
    (lambda: tensor(_L0, _E, 2**64 - 1), ValueError, "'handle'"),
    (lambda: tensor(LT(0, _F, [2, 3], LT.any), _E), ValueError, "'lt' must have layout"),
    (lambda: tensor(LT(0, _F, 2, LT.strided), _E), ValueError, "'lt' has unknown sizes"),
    (lambda: tensor(LT(0, _F, [2, 3], 4242), _E), ValueError, "'lt' has layout id 4242"),
    (lambda: tensor(_L0, engine.cpu), TypeError, "'engine' must be an engine"),
    (lambda: tensor(_L0, _E, 0).numpy(), ValueError, "no memory"),
    (lambda: _T0.__dlpack__(stream=1), ValueError, "'stream'"),
    (lambda: tensor(_L0, _E, _RO).__dlpack__(), BufferError, "read-only"),
    (lambda: dg.set_compiled_partition_cache_capacity("1"), TypeError, "'capacity'"),
    (lambda: dg.set_constant_tensor_cache(2**40), ValueError, "'flag'"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_input(index):
    call, exception, message = BAD[index]
    with pytest.raises(exception, match=message):
        call()
