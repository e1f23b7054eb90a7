"""Memory shared with numpy and torch: addresses, lifetimes, layouts, in-place, constants."""

import gc
import weakref

import cases
import numpy as np
import pytest
from cases import LT, VERSION, normal

import dnnl_graph as dg
from dnnl_graph import engine, op, stream, tensor

ml_dtypes = pytest.importorskip("ml_dtypes")
E = engine(engine.cpu, 0)
S = stream(E)


def lt_of(dtype, shape, tid=0):
    return LT(tid, getattr(LT, dtype), list(shape), LT.strided)


NUMPY = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "s32": np.int32,
    "s8": np.int8,
    "u8": np.uint8,
    "boolean": np.bool_,
    "f8_e5m2": ml_dtypes.float8_e5m2,
    "f8_e4m3": ml_dtypes.float8_e4m3fn,
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_both_ways(name):
    if not hasattr(LT, name):
        pytest.skip(f"{name} is not in oneDNN {VERSION}")
    x = np.arange(6).reshape(2, 3).astype(NUMPY[name])
    t = tensor(lt_of(name, (2, 3)), E, x)
    y = t.numpy()
    assert y.dtype == x.dtype and y.ctypes.data == x.ctypes.data and (y == x).all()
    assert np.asarray(t).ctypes.data == x.ctypes.data
    assert np.array(t, copy=True).ctypes.data != x.ctypes.data


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "s32", "s8", "u8", "boolean", "f8_e5m2"])
def test_torch_both_ways(name):
    torch = pytest.importorskip("torch")
    if not hasattr(LT, name):
        pytest.skip(f"{name} is not in oneDNN {VERSION}")
    torch_name = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "s32": "int32",
                  "s8": "int8", "u8": "uint8", "boolean": "bool",
                  "f8_e5m2": "float8_e5m2"}[name]  # fmt: skip
    x = torch.arange(6).reshape(2, 3).to(getattr(torch, torch_name))
    t = tensor(lt_of(name, (2, 3)), E, x)
    assert t.get_data_handle() == x.data_ptr()
    back = torch.from_dlpack(t)
    assert back.data_ptr() == x.data_ptr() and back.dtype == x.dtype
    assert (back.float() == x.float()).all()
    own = tensor(lt_of(name, (2, 3)), E)
    view = torch.from_dlpack(own)
    address = own.get_data_handle()
    del own
    gc.collect()
    assert view.data_ptr() == address and (view.float() == 0).all()


def test_torch_refusals():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="strides"):
        tensor(lt_of("f32", (2, 3)), E, torch.zeros(3, 2).T)
    with pytest.raises(TypeError, match="element type"):
        tensor(lt_of("f32", (2, 3)), E, torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises((BufferError, RuntimeError)):
        tensor(lt_of("f32", (2, 3)), E, torch.zeros(2, 3, requires_grad=True))
    with pytest.raises(ValueError, match=r"(?i)device"):
        tensor(lt_of("f32", (2, 3)), E, torch.zeros(2, 3, device="meta"))

    class Elsewhere:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self):
            raise AssertionError("must not be asked")

    with pytest.raises(ValueError, match="must be in CPU memory, its DLPack device type is 2"):
        tensor(lt_of("f32", (2, 3)), E, Elsewhere())


def test_dlpack_of_numpy_and_versions():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = tensor(lt_of("f32", (2, 3)), E, x)
    assert np.from_dlpack(t).ctypes.data == x.ctypes.data
    assert t.__dlpack_device__() == (1, 0)
    assert '"dltensor"' in repr(t.__dlpack__())
    assert '"dltensor_versioned"' in repr(t.__dlpack__(max_version=(1, 0)))
    x.setflags(write=False)
    frozen = tensor(lt_of("f32", (2, 3)), E, x)
    assert not frozen.numpy().flags.writeable
    assert not np.from_dlpack(frozen).flags.writeable
    with pytest.raises(BufferError):
        frozen.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError):
        frozen.__dlpack__(copy=True)


def test_a_capsule_is_taken_once():
    class Once:
        capsule = tensor(lt_of("f32", (2,)), E).__dlpack__()

        def __dlpack__(self):  # an old producer: no max_version
            return self.capsule

    tensor(lt_of("f32", (2,)), E, Once())
    with pytest.raises(TypeError, match="fresh DLPack capsule"):
        tensor(lt_of("f32", (2,)), E, Once())


def test_memory_lives_as_long_as_needed():
    class Array(np.ndarray):  # ndarray itself takes no weak references
        pass

    x = np.arange(6, dtype=np.float32).reshape(2, 3).view(Array)
    alive = weakref.ref(x)
    t = tensor(lt_of("f32", (2, 3)), E, x)
    view, capsule = t.numpy(), t.__dlpack__()
    del x, t
    gc.collect()
    assert alive() is not None and view[1, 2] == 5
    del view
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_zero_size_and_zero_dim():
    t = tensor(lt_of("f32", (0, 3)), E)
    assert t.numpy().shape == (0, 3)
    assert tensor(lt_of("f32", (0, 3)), E, np.zeros((0, 3), np.float32)).numpy().size == 0
    scalar = tensor(lt_of("f32", (1,)), E, np.float32([2.5]).reshape(()))
    assert scalar.numpy().tolist() == [2.5]
    (y,) = cases.run_one(op.Multiply, [normal(2, 3), np.float32([2.5])], [((2, 3), LT.f32)])
    np.testing.assert_allclose(y, normal(2, 3) * 2.5)


def two_convs():
    attrs = {"strides": [1, 1], "pads_begin": [1, 1], "pads_end": [1, 1], "dilations": [1, 1]}
    shapes = [(1, 16, 8, 8), (16, 16, 3, 3), (1, 16, 8, 8), (16, 16, 3, 3), (1, 16, 8, 8)]
    g = dg.graph(engine.cpu)
    lts = [LT(i, LT.f32, list(s), LT.any if i == 2 else LT.strided) for i, s in enumerate(shapes)]
    for i in range(2):
        o = op(i, op.Convolution, [lts[2 * i], lts[2 * i + 1]], [lts[2 * i + 2]], f"conv{i}")
        for name, value in attrs.items():
            o.set_attr(getattr(op.attr, name), value)
        o.set_attr(op.data_format, "NCX").set_attr(op.weights_format, "OIX")
        g.add_op(o)
    g.finalize()
    return g, normal(*shapes[0]), normal(*shapes[1], seed=1), normal(*shapes[3], seed=2)


def reference_two_convs(x, w0, w1):
    args = ([1, 1], [1, 1], [1, 1], [1, 1])
    return cases.conv(cases.conv(x, w0, *args), w1, *args)


def test_layout_any_between_two_partitions():
    g, x, w0, w1 = two_convs()
    policy = dg.partition.debug  # 3.2 would make one partition of this
    assert len(g.get_partitions(policy)) == 2
    y = dg.run(g, {0: x, 1: w0, 3: w1}, policy=policy)["conv1"]
    np.testing.assert_allclose(y, reference_two_convs(x, w0, w1), rtol=1e-3, atol=1e-2)


def test_opaque_weights():
    """A weight with layout any: the library names the layout it wants, and takes it."""
    g, x, w0, _ = two_convs()
    p = g.get_partitions(dg.partition.debug)[0]
    src, wei = p.get_input_ports()
    dims = wei.get_dims()
    dst = LT(2, LT.f32, [1, 16, 8, 8], LT.strided)
    asked = p.compile([src, LT(1, LT.f32, dims, LT.any, LT.constant)], [dst], E)
    lt = asked.query_logical_tensor(1)
    if lt.get_layout_type() != LT.opaque:
        assert lt.get_layout_type() == LT.strided  # a CPU that likes a plain layout best
        return
    assert lt.get_mem_size() >= w0.nbytes
    again = LT(1, LT.f32, dims, lt.get_layout_id(), LT.constant)
    assert again.is_equal(lt) and again.get_mem_size() == lt.get_mem_size()
    assert not lt.is_equal(LT(1, LT.f32, dims, LT.strided, LT.constant))
    with pytest.raises(ValueError, match="layout that only the library knows"):
        tensor(lt, E).numpy()
    with pytest.raises(ValueError, match="layout that only the library knows"):
        tensor(lt, E).__dlpack__()
    with pytest.raises(ValueError, match=r"bytes, .* needs"):
        tensor(lt, E, np.zeros(8, np.uint8))
    memory = np.zeros(lt.get_mem_size(), np.uint8)
    memory.view(np.float32)[: w0.size] = w0.ravel()
    results = []
    for compiled in (asked, p.compile([src, again], [dst], E)):
        y = np.empty((1, 16, 8, 8), np.float32)
        compiled.execute(S, [tensor(src, E, x), tensor(again, E, memory)], [tensor(dst, E, y)])
        results.append(y)
    # The same bytes mean the same weights to both.
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="opaque"):
        asked.execute(
            S,
            [tensor(src, E, x), tensor(LT(1, LT.f32, dims, LT.strided), E, w0)],
            [tensor(dst, E, np.empty((1, 16, 8, 8), np.float32))],
        )


def test_strided_output_of_other_order():
    p = cases.relu_graph((2, 3, 4)).get_partitions()[0]
    x = normal(2, 3, 4)
    y = np.empty((2, 4, 3), np.float32).transpose(0, 2, 1)
    out = dg.logical_tensor_like(1, y)
    c = p.compile([dg.logical_tensor_like(0, x)], [out], E)
    c.execute(S, [tensor(c.query_logical_tensor(0), E, x)], [tensor(out, E, y)])
    np.testing.assert_array_equal(y, np.maximum(x, 0))


def test_unknown_sizes_are_inferred():
    o = op(0, op.MatMul, [LT(0, LT.f32, LT.strided), LT(1, LT.f32, LT.strided)],
           [LT(2, LT.f32, LT.strided)])  # fmt: skip
    g = dg.graph(engine.cpu)
    g.add_op(o)
    g.finalize()
    (p,) = g.get_partitions()
    for m in (3, 5):
        a, b = normal(m, 4), normal(4, 6, seed=1)
        c = p.compile(
            [dg.logical_tensor_like(0, a), dg.logical_tensor_like(1, b)],
            [LT(2, LT.f32, [dg.DNNL_GRAPH_UNKNOWN_DIM, 6], LT.strided)],
            E,
        )
        assert c.query_logical_tensor(2).get_dims() == [m, 6]
        assert c.query_logical_tensor(2).get_strides() == [6, 1]
        np.testing.assert_allclose(dg.run(g, [a, b])[2], a @ b, rtol=1e-4, atol=1e-5)


def test_in_place():
    x, w, rest = normal(4, 8), normal(8, 5, seed=1), normal(4, 5, seed=2)
    lts = [dg.logical_tensor_like(i, a) for i, a in enumerate((x, w, rest))]
    inner, out = (LT(i, LT.f32, [4, 5], LT.strided) for i in (3, 4))
    g = dg.graph(engine.cpu)
    g.add_op(op(0, op.MatMul, lts[:2], [inner]))
    g.add_op(op(1, op.Add, [inner, lts[2]], [out]))
    g.finalize()
    (p,) = g.get_partitions()
    c = cases.compile_like(p)
    assert c.get_inplace_ports() == [(2, 4)]
    want = x @ w + rest
    arrays = zip(lts, (x, w, rest), strict=True)
    c.execute(S, [tensor(lt, E, a) for lt, a in arrays], [tensor(out, E, rest)])
    np.testing.assert_allclose(rest, want, rtol=1e-4, atol=1e-5)


def test_run_takes_constants_anew():
    """oneDNN 3.2 caches what it makes of a constant by default, whatever its address."""
    x = normal(4, 8)
    for seed in (1, 2):
        w = normal(8, 6, seed=seed)
        (y,) = cases.run_one(op.MatMul, [x, w], [((4, 6), LT.f32)], constants=(1,))
        np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-5)
