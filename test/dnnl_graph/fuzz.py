"""Random changes to the graphs of test_ops: whatever comes of it, the process has to survive.

    python fuzz.py FIRST COUNT LOG    # seeds, and a file for what is being tried

Each graph is one op of test_ops with, at times, ops before and behind it that oneDNN may fuse. Some
of its sizes, attributes, data types, layouts and properties are changed. What compiles is executed
in memory that ends (or starts) where the process may not read: a kernel that reads or writes
outside of its tensors is a crash.
"""

import collections
import ctypes
import itertools
import mmap
import random
import sys

import numpy as np
import test_ops
from cases import LT

import dnnl_graph as dg
from dnnl_graph import engine, op, stream, tensor

INTS = [-1, 0, 1, 2, 3, 4, 5, 7, 12, -2, -5, 100, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63)]
FLOATS = [0.0, -1.0, 1.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e30, 1e-30, -0.0]
STRINGS = [
    *("NCX", "NXC", "OIX", "XIO", "IOX", "XOI", "None", "SAME_UPPER", "SAME_LOWER", "VALID"),
    *("per_tensor", "per_channel", "per_group", "none", "numpy", "nearest", "linear"),
    *("half_pixel", "align_corners", "floor", "ceil", "x"),
]
TYPES = [t for n, t in LT.data_type.__members__.items() if n != "undef"]
ATTRS = [a for n, a in op.attr.__members__.items() if n not in ("undef", "end")]
CASES = [c for c in test_ops.CASES if c.kind in op.kind.__members__]
UNARY = ["ReLU", "Tanh", "Square", "Round", "Sigmoid", "Reorder", "SoftMax", "TypeCast", "Quantize"]
LARGEST = 64 << 20  # bytes to execute with

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """Memory with a forbidden page at both ends, right at one of them."""

    def __init__(self, size, at_start):
        page = mmap.PAGESIZE
        inner = -(-max(size, 1) // page) * page
        self.length = inner + 2 * page
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.base = libc.mmap(None, self.length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert self.base not in (None, ctypes.c_void_p(-1).value)
        for edge in (self.base, self.base + page + inner):
            assert libc.mprotect(edge, page, 0) == 0
        self.address = self.base + page + (0 if at_start else inner - size)

    def __del__(self):
        libc.munmap(self.base, self.length)


def change_shape(r, shape):
    s = list(shape)
    i = r.randrange(len(s)) if s else None
    how = r.randrange(9)
    if how == 0:
        s = []
    elif how == 1:
        s = [r.choice([1, 2, 3, 4, 6, 7])]
    elif how == 2:
        s = [r.choice([1, 2, 3, 4]) for _ in range(r.randrange(7))]
    elif how == 3:
        s.insert(r.randrange(len(s) + 1), r.choice([1, 1, 2, 3]))
    elif i is None:
        s = [1]
    elif how == 4:
        s[i] = r.choice([0, 1, 2, 3, 5, 8, 16, 17])
    elif how == 5:
        s.pop(i)
    elif how == 6:
        s[i] = max(0, s[i] + r.choice([-1, 1]))
    elif how == 7:
        s[i] = r.choice([2**20, 2**31, 2**33])
    else:
        r.shuffle(s)
    return s


def change_value(r, value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return r.choice(STRINGS)
    if not isinstance(value, list):
        return r.choice(INTS if isinstance(value, int) else FLOATS)
    v = list(value)
    pool = FLOATS if any(isinstance(x, float) for x in v) else INTS
    how = r.randrange(5)
    if how == 0 and v:
        v[r.randrange(len(v))] = r.choice(pool)
    elif how == 1 and v:
        v.pop()
    elif how == 2:
        v.append(r.choice(pool))
    elif how == 3:
        v = [r.choice(pool) for _ in v]
    else:
        v = [r.choice(pool[:8]) for _ in range(r.randrange(1, 13))]
    return v


def change_layout(r, tid, dtype, shape, ptype):
    how = r.randrange(10)
    if how < 5:
        return LT(tid, dtype, shape, LT.strided, ptype)
    if how < 7:
        return LT(tid, dtype, shape, LT.any, ptype)
    order = list(range(len(shape)))
    r.shuffle(order)
    strides, step = [0] * len(shape), 1
    for i in order:
        strides[i] = step
        step *= max(1, shape[i])
    if how == 8 and strides:
        strides[r.randrange(len(strides))] = r.choice([0, 1, 2, 1000, 2**20])
    elif how == 9:
        strides = [2 * s for s in strides]
    return LT(tid, dtype, shape, strides, ptype)


def put_in_front(r, g, lt, new_id):
    """Adds an op that writes `lt`; returns what it reads."""
    dtype = r.choice([LT.u8, LT.s8, LT.bf16])
    source = change_layout(r, new_id(), dtype, lt.get_dims(), r.choice([LT.variable, LT.constant]))
    if dtype == LT.bf16:
        o = op(new_id(), op.TypeCast, [source], [lt])
    else:
        count = r.choice([1, 1, 3, 4])
        o = op(new_id(), op.Dequantize, [source], [lt])
        o.set_attr(op.scales, [0.1] * count).set_attr(op.zps, [0] * count)
        o.set_attr(op.qtype, "per_tensor" if count == 1 else "per_channel")
        o.set_attr(op.axis, r.choice([0, 1, -1]))
    g.add_op(o)
    return source


def put_behind(r, g, lt, new_id):
    """Adds an op that reads `lt`; returns what it writes and what else it reads."""
    kind = r.choice([*UNARY, "Add", "Multiply", "PReLU", "BiasAdd"])
    extra = []
    if kind not in UNARY:
        shape = r.choice([[1], [3], [4], [1, 3, 1], [1, 4, 1, 1], [2, 3, 4], [2, 4, 3, 3]])
        extra = [change_layout(r, new_id(), lt.get_data_type(), shape, LT.variable)]
    dtype = {"Quantize": LT.u8, "TypeCast": LT.bf16}.get(kind, lt.get_data_type())
    result = LT(new_id(), dtype, -1, r.choice([LT.strided, LT.any]), LT.variable)
    o = op(new_id(), getattr(op, kind), [lt, *extra], [result])
    if kind == "Quantize":
        o.set_attr(op.scales, [0.1]).set_attr(op.zps, [0])
    g.add_op(o)
    return result, extra


def build(r):
    """The kind of its main op, the graph, and the logical tensors to compile it with."""
    case = r.choice(CASES)
    attrs = dict(case.attrs)
    shapes = [list(x.shape) for x in case.inputs]
    types = [dg.logical_tensor_like(0, x).get_data_type() for x in case.inputs]
    out_shapes = [list(e.shape) for e in case.expected]
    out_types = list(case.dtypes or [LT.f32] * len(out_shapes))
    for _ in range(r.choice([0, 1, 1, 1, 2, 3])):
        what = r.randrange(12)
        if what < 4:
            i = r.randrange(len(shapes))
            shapes[i] = change_shape(r, shapes[i])
        elif what < 8 and attrs:
            name = r.choice(list(attrs))
            attrs[name] = change_value(r, attrs[name])
        elif what == 8:
            value = r.choice([1, 1.0, "a", True, [1, 2], [1.0, 2.0]])
            attrs.setdefault(r.choice(ATTRS).name, change_value(r, value))
        elif what == 9 and len(shapes) > 1 and r.random() < 0.5:
            shapes.pop()
            types.pop()
        elif what == 9:
            shapes.append(shapes[0])
            types.append(types[0])
        elif what == 10:
            types[r.randrange(len(types))] = r.choice(TYPES)
        elif what == 11:
            out_types[r.randrange(len(out_types))] = r.choice(TYPES)
    if r.random() < 0.2:
        i = r.randrange(len(out_shapes))
        out_shapes[i] = change_shape(r, out_shapes[i])
    hide_outputs, hide_in_graph = r.random() < 0.6, r.random() < 0.4
    ins = [
        change_layout(r, i, t, s, r.choice([LT.variable] * 4 + [LT.constant]))
        for i, (t, s) in enumerate(zip(types, shapes, strict=True))
    ]
    if r.random() < 0.05 and len(ins) > 1:
        ins[1] = ins[0]
    outs = [
        LT(100 + i, t, -1, r.choice([LT.strided, LT.any]))
        if hide_outputs
        else change_layout(r, 100 + i, t, s, LT.variable)
        for i, (t, s) in enumerate(zip(out_types, out_shapes, strict=True))
    ]

    ids = itertools.count(1000)

    def new_id():
        return next(ids)

    def in_graph(lt):
        if not hide_in_graph:
            return lt
        return LT(lt.get_id(), lt.get_data_type(), -1, LT.strided, lt.get_property_type())

    g = dg.graph(engine.cpu)
    o = op(0, getattr(op, case.kind))
    for name, value in attrs.items():
        o.set_attr(getattr(op.attr, name), value)
    o.add_inputs([in_graph(lt) for lt in ins])
    o.add_outputs([in_graph(lt) for lt in outs])
    g.add_op(o)
    ports = {lt.get_id(): lt for lt in ins + outs}
    if r.random() < 0.5:
        for lt in ins:
            if lt.get_data_type() == LT.data_type.f32 and r.random() < 0.5:
                source = put_in_front(r, g, ports.pop(lt.get_id(), ins[0]), new_id)
                ports[source.get_id()] = source
        tail = in_graph(outs[0])
        while r.random() < 0.6:
            tail, extra = put_behind(r, g, tail, new_id)
            ports.update({lt.get_id(): lt for lt in [tail, *extra]})
    g.finalize()
    return case.kind, g, ports


def execute(r, compiled, ports_in, ports_out):
    lts = {p.get_id(): compiled.query_logical_tensor(p.get_id()) for p in ports_in + ports_out}
    if sum(lt.get_mem_size() for lt in lts.values()) > LARGEST:
        return "too large to execute"
    rng = np.random.default_rng(r.randrange(2**32))
    memory, tensors = [], {}
    for tid, lt in lts.items():
        memory.append(Guarded(lt.get_mem_size(), at_start=r.random() < 0.2))
        tensors[tid] = tensor(lt, E, memory[-1].address)
        values = rng.uniform(0.1, 1, lt.get_mem_size() // 4).astype(np.float32).tobytes()
        ctypes.memmove(memory[-1].address, values, len(values))
    ins = {p.get_id(): tensors[p.get_id()] for p in ports_in}
    compiled.execute(S, list(ins.values()), [tensors[p.get_id()] for p in ports_out])
    return "executed"


def sized(compiled, lt):
    dims = compiled.query_logical_tensor(lt.get_id()).get_dims()
    layout = LT.any if lt.get_layout_type() == LT.any else LT.strided
    return LT(lt.get_id(), lt.get_data_type(), dims, layout, lt.get_property_type())


def one(seed, say):
    """What became of the graph of this seed."""
    r = random.Random(seed)
    try:
        kind, g, ports = build(r)
    except (TypeError, ValueError, dg.error) as e:
        return f"not built: {type(e).__name__}"
    results = set()
    for p in g.get_partitions(r.choice([dg.partition.fusion, dg.partition.debug])):
        if not p.is_supported():
            results.add("not supported")
            continue
        sides = p.get_input_ports(), p.get_output_ports()
        ins, outs = ([ports.get(lt.get_id(), lt) for lt in side] for side in sides)
        say(f"{seed} {kind} compiles {p}: {ins} -> {outs}")
        compiled = None
        try:
            compiled = p.compile(ins, outs, E)
            # The binding has to agree with the library about the sizes that this one inferred.
            p.compile(ins, [sized(compiled, lt) for lt in outs], E)
            say(f"{seed} {kind} executes {p}: {ins} -> {outs}")
            results.add(execute(r, compiled, *sides))
        except (TypeError, ValueError, dg.error) as e:
            if compiled is not None and "does not fit" in str(e):
                raise RuntimeError("the library infers other sizes") from e
            results.add(type(e).__name__)
    return " + ".join(sorted(results))


def main(first, count, log):
    counts = collections.Counter()
    with open(log, "w+") as f:

        def say(text):  # the last line tells what the process died of
            f.seek(0)
            f.truncate()
            f.write(text)
            f.flush()

        for seed in range(first, first + count):
            say(str(seed))
            counts[one(seed, say)] += 1
    print(dict(counts.most_common()))


E = engine(engine.cpu, 0)
S = stream(E)

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
