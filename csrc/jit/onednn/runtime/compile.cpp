#include "jit/onednn/runtime/compile.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <malloc.h>
#include <oneapi/dnnl/dnnl_version.h>

#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "jit/onednn/ops/op_table.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/own_pointwise.h"
#include "jit/onednn/runtime/own_quantized.h"
#include "jit/onednn/runtime/own_steps.h"
#include "jit/onednn/runtime/partition_key.h"
#include "jit/onednn/runtime/releasable_weights.h"

namespace llga {
namespace {

using dnnl::graph::logical_tensor;
using LayoutType = logical_tensor::layout_type;
namespace prim = torch::jit::prim;

class PlanCompiler {
 public:
  // `pack`: let oneDNN choose the layout of constant weights.
  PlanCompiler(const CompileRequest& request, bool pack) : draft_(request, pack), pack_(pack) {}

  std::shared_ptr<const Plan> run() {
    if (addUnlowered(draft_)) {
      return draft_.finished();
    }
    lower();
    addCopiesWithoutGaps(draft_);
    const bool may_be_own = draft_.request.division != Division::onednn;
    if (may_be_own) {
      addCopiesOfPlanes(draft_);
    }
    const bool own = may_be_own && addOwnGroup(draft_);
    if (!own && !addOwnChain()) {
      for (const auto& partition : partitions()) {
        const auto ops = opsOf(partition);
        const auto* applied = activationWith(ops.front());
        if (applied == nullptr) {
          add(partition, ops);
        } else if (applied->ops.front() == ops.front()) {
          add(partition, applied->ops);  // the other partitions of it are done then
        }
      }
    }
    return draft_.finished();
  }

  Description describe(const std::vector<Shape>& output_strides) {
    Description result;
    result.fpmath_mode = draft_.request.fpmath_mode;
    if (isUnlowered(draft_.request)) {
      return result;  // nothing of it is oneDNN's
    }
    lower();
    if (isOnlyOurs(draft_.lowered)) {
      return result;
    }
    for (const auto& partition : partitions()) {
      auto& part = result.partitions.emplace_back();
      std::unordered_map<size_t, Layout> ports;
      for (const auto& port : partition.get_input_ports()) {
        part.inputs.push_back(port.get_id());
        ports.emplace(port.get_id(), draft_.inputLayout(port.get_id()));
      }
      for (const auto& port : partition.get_output_ports()) {
        const auto id = port.get_id();
        auto layout = draft_.outputLayout(id);
        if (const auto it = draft_.group_outputs.find(id); it != draft_.group_outputs.end()) {
          const auto& operand = draft_.lowered.operands.at(id);
          layout = strided(id, operand.dtype, *operand.sizes, output_strides.at(it->second));
          result.group_outputs.emplace(id, it->second);
        } else if (const auto* applied = draft_.appliedTo(id)) {
          const auto to = draft_.group_outputs.find(applied->to);
          if (to != draft_.group_outputs.end()) {
            const auto& operand = draft_.lowered.operands.at(id);
            layout = strided(id, operand.dtype, *operand.sizes, output_strides.at(to->second));
          }
        }
        part.outputs.push_back(id);
        ports.emplace(id, layout);
        draft_.layouts.insert_or_assign(id, layout);
      }
      for (const auto* spec : opsOf(partition)) {
        part.ops.push_back(describeOp(*spec, ports));
      }
      for (const auto id : part.inputs) {
        if (const auto it = draft_.group_inputs.find(id); it != draft_.group_inputs.end()) {
          result.group_inputs.emplace(id, it->second);
        } else if (draft_.lowered.operands.at(id).constant) {
          result.constants.emplace(id, constantMaker(id));
        }
      }
    }
    return result;
  }

 private:
  static Description::Op describeOp(const OpSpec& spec,
                                    const std::unordered_map<size_t, Layout>& ports) {
    auto tensors = [&](const std::vector<Operand>& operands) {
      std::vector<Layout> layouts;
      for (const auto& operand : operands) {
        const auto port = ports.find(operand.id);
        layouts.push_back(port != ports.end() ? port->second : operand.logicalTensor());
      }
      return layouts;
    };
    return {spec.id(),
            spec.kind(),
            spec.name(),
            spec.attributes(),
            tensors(spec.inputs()),
            tensors(spec.outputs())};
  }

  ConstantMaker constantMaker(size_t id) const {
    if (const auto it = draft_.lowered.constants.find(id); it != draft_.lowered.constants.end()) {
      return it->second;
    }
    return [tensor = draft_.constantTensor(id)] { return tensor; };
  }

  std::optional<int64_t> rankOf(const Value* value) const {
    const auto sizes = draft_.request.facts->tensor(value).sizes;
    return sizes ? std::optional(static_cast<int64_t>(sizes->size())) : std::nullopt;
  }

  void lower() {
    for (const auto* node : draft_.request.subgraph->nodes()) {
      if (node->kind() == prim::Constant || node->kind() == prim::ListConstruct ||
          isShapeArithmetic(node) || isQuantizedConstant(node) ||
          (node->outputs().size() == 1 && !node->output()->uses().empty() &&
           paddingOf(node->output()->uses()[0].user) == node)) {
        continue;
      }
      if (isIdentity(node)) {
        const auto from = draft_.request.facts->tensor(node->input(0));
        const auto to = draft_.request.facts->tensor(node->output());
        if (from.dtype != to.dtype) {
          throw CompileError{qualifiedName(node) + ": converts its result to another data type"};
        }
        if (node->kind() == operandKind() && from.sizes != to.sizes) {
          throw CompileError{qualifiedName(node) + ": expanded to sizes that the other has not"};
        }
        if (node->kind() == ofBatchKind() && rankOf(node->input(1)) != node->i(rankAttr())) {
          throw CompileError{qualifiedName(node) + ": the image has no batch"};
        }
        continue;
      }
      const auto* entry = findOp(node);
      if (entry == nullptr) {
        throw CompileError{qualifiedName(node) + ": not in the op table"};
      }
      try {
        Lowering lowering(node, *draft_.request.facts, next_id_);
        entry->lower(lowering);
        std::move(lowering).commit(draft_.lowered);
      } catch (const Refused& refused) {
        throw CompileError{refused.reason};
      }
    }
  }

  // Where one kernel of our own computes all, in a chain, oneDNN need not be asked for partitions:
  // that takes it several milliseconds, and networks have a hundred groups. False, and nothing is
  // done, for any other group.
  bool addOwnChain() {
    const auto& request = draft_.request;
    if (request.division != Division::usual || request.way_of || !isChain() || !cuts().empty() ||
        !activationsApart(draft_.lowered, draft_.group_outputs).empty()) {
      return false;
    }
    draft_.pack = pack_;
    return addOwnStep(draft_, llga::opsOf(draft_.lowered), Way::usual);
  }

  // Whether each op reads what the one before it gives, and nothing else of the group, of which
  // only the last result is read outside.
  bool isChain() const {
    const auto producers = producerKinds(draft_.lowered);
    std::optional<size_t> last;
    for (const auto& op : draft_.lowered.ops) {
      const auto& inputs = op.inputs();
      const auto inside = std::count_if(inputs.begin(), inputs.end(), [&](const Operand& input) {
        return producers.count(input.id) != 0;
      });
      const auto of_last = std::count_if(inputs.begin(), inputs.end(),
                                         [&](const Operand& input) { return input.id == last; });
      if (op.outputs().size() != 1 || inside != of_last || of_last != (last ? 1 : 0)) {
        return false;
      }
      last = op.outputs()[0].id;
    }
    return last && draft_.group_outputs.size() == 1 && draft_.group_outputs.count(*last) != 0;
  }

  // The partitions in an order in which each finds its inputs computed.
  std::vector<dnnl::graph::partition> partitions() {
    dnnl::graph::graph graph(dnnl::engine::kind::cpu, draft_.request.fpmath_mode);
    std::unordered_set<size_t> open;
    for (const auto& emitted : draft_.lowered.ops) {
      graph.add_op(emitted.build());
      open.insert(emitted.id());
    }
    // Without a reader outside, oneDNN would keep a value that others in the group read.
    auto read = [&](size_t id) {
      dnnl::graph::op end(next_id_++, OpKind::End, "output");
      end.add_input(draft_.lowered.operands.at(id).logicalTensor());
      graph.add_op(end);
    };
    for (const auto& [id, index] : draft_.group_outputs) {
      read(id);
    }
    for (const auto id : cuts()) {
      read(id);
    }
    if (draft_.request.division != Division::activations_fused) {
      draft_.activations = activationsApart(draft_.lowered, draft_.group_outputs);
    }
    for (const auto& applied : draft_.activations) {
      read(applied.from);
      if (draft_.group_outputs.count(applied.to) == 0) {
        read(applied.to);
      }
    }
    graph.finalize();

    std::vector<dnnl::graph::partition> found;
    for (auto& partition : graph.get_partitions(dnnl::graph::partition::policy::fusion)) {
      bool ours = false;
      for (const auto id : partition.get_ops()) {
        ours = open.erase(id) != 0 || ours;
      }
      if (!ours) {
        continue;
      }
      if (!partition.is_supported()) {
        throw CompileError{"oneDNN does not support a partition at these sizes"};
      }
      found.push_back(std::move(partition));
    }
    if (!open.empty()) {
      throw CompileError{"oneDNN left ops of the group out at these sizes"};
    }
    std::erase_if(draft_.activations, [&](const ActivationApart& applied) {
      return std::any_of(found.begin(), found.end(), [&](const dnnl::graph::partition& partition) {
        const auto ops = opsOf(partition);
        const auto inside = std::count_if(ops.begin(), ops.end(), [&](const OpSpec* op) {
          return std::find(applied.ops.begin(), applied.ops.end(), op) != applied.ops.end();
        });
        return inside != 0 && inside != static_cast<int64_t>(ops.size());
      });
    });
    return inOrder(std::move(found));
  }

  // The activation apart that this op is part of; or null.
  const ActivationApart* activationWith(const OpSpec* op) const {
    const auto& all = draft_.activations;
    const auto it = std::find_if(all.begin(), all.end(), [op](const ActivationApart& applied) {
      return std::find(applied.ops.begin(), applied.ops.end(), op) != applied.ops.end();
    });
    return it == all.end() ? nullptr : &*it;
  }

  // In the order of the subgraph.
  Ops opsOf(const dnnl::graph::partition& partition) const {
    const auto members = partition.get_ops();
    Ops ops;
    for (const auto& op : draft_.lowered.ops) {
      if (std::find(members.begin(), members.end(), op.id()) != members.end()) {
        ops.push_back(&op);
      }
    }
    return ops;
  }

  // Values that are not fused to the op that reads them: a binary op, a convolution, a softmax, or
  // what reads a softmax.
  std::unordered_set<size_t> cuts() const {
    const auto producers = producerKinds(draft_.lowered);
    const auto& ops = draft_.lowered.ops;
    const bool product = std::any_of(ops.begin(), ops.end(),
                                     [](const OpSpec& op) { return op.kind() == OpKind::MatMul; });
    const bool quantized = std::any_of(
        ops.begin(), ops.end(), [](const OpSpec& op) { return op.kind() == OpKind::Dequantize; });
    const bool folded = std::any_of(ops.begin(), ops.end(), isFolded);
    std::unordered_set<size_t> found;
    // In bfloat16 oneDNN would take the convolutions of a residual block together.
    const bool apart = std::any_of(ops.begin(), ops.end(), [&](const OpSpec& op) {
      return winogradConvolution({&op}, draft_.lowered, Way::usual).has_value() ||
             narrowConvolution({&op}, draft_.lowered).has_value();
    });
    const bool narrow = ownsQuantizedProducts();
    const auto root_of = roots();
    std::unordered_set<size_t> reduced;   // by our own kernel, where oneDNN's is the reference
    std::unordered_set<size_t> products;  // by our own kernels, which have few functions behind
    std::unordered_set<size_t> depthwise;
    for (const auto& op : ops) {
      const auto multiplied = linear({&op}, draft_.lowered, Way::usual);
      const auto direct = directConvolution({&op}, draft_.lowered);
      if ((multiplied && !multiplied->if_narrow) || groupedConvolution({&op}, draft_.lowered) ||
          (direct && (direct->kernel.isSmall() || direct->kernel.isWide()))) {
        products.insert(op.outputs()[0].id);
      }
      if (depthwiseConvolution({&op}, draft_.lowered)) {
        depthwise.insert(op.outputs()[0].id);
      }
      const auto from = op.inputs()[0].id;
      const bool apart_from_it =
          products.count(from) != 0 ||
          (depthwise.count(from) != 0 && op.kind() != OpKind::LeakyReLU);  // which that has
      if (apart_from_it && isFunctionApart(op) && draft_.group_outputs.count(from) == 0) {
        found.insert(from);
      }
      if (reduction({&op})) {
        reduced.insert(op.outputs()[0].id);
      }
      // oneDNN would take all convolutions of a stage of ResNets together.
      if (narrow && op.kind() == OpKind::Quantize &&
          draft_.group_outputs.count(op.outputs()[0].id) == 0) {
        found.insert(op.outputs()[0].id);
      }
      if (apart && op.kind() == OpKind::Convolution && producers.count(op.inputs()[0].id) != 0) {
        found.insert(op.inputs()[0].id);
      }
      if (isSoftmaxAcross(op)) {
        for (const auto id : {op.inputs()[0].id, op.outputs()[0].id}) {
          if (producers.count(id) != 0 && draft_.group_outputs.count(id) == 0) {
            found.insert(id);
          }
        }
      }
      if (isPointwise(op)) {
        for (const auto& input : op.inputs()) {
          if (reduced.count(input.id) != 0 && draft_.group_outputs.count(input.id) == 0) {
            found.insert(input.id);
          }
        }
      }
      if (!isBinary(op.kind())) {
        continue;
      }
      for (const auto i : {0, 1}) {
        const auto& value = op.inputs()[i];
        const auto& other = op.inputs()[1 - i];
        const auto producer = producers.find(value.id);
        if (producer == producers.end() || draft_.group_outputs.count(value.id) != 0) {
          continue;
        }
        if (draft_.request.division == Division::binaries_apart ||
            (product && usesAvxGemm() && !addsToGemm(other, value)) ||
            (ownKernelsAnywhere() && root_of.at(value.id) == OpKind::MatMul &&
             (isAppliedByRow(value, other) || (!quantized && isAppliedToOneRow(value, other)))) ||
            (folded && !foldsLike(value, other)) || isMisread(other, value, root_of.at(value.id)) ||
            isLeftOut(op, other, value, root_of.at(value.id)) ||
            (op.kind() == OpKind::Add && isBinary(producer->second) &&
             isCopiedToAdd(other, value))) {
          found.insert(value.id);
        }
      }
    }
    return found;
  }

  // Of each value, the kind of the op that gives it, or from which it is computed number by number.
  std::unordered_map<size_t, OpKind> roots() const {
    std::unordered_map<size_t, OpKind> found;
    for (const auto& op : draft_.lowered.ops) {
      const auto source = found.find(op.inputs()[0].id);
      const bool passes = op.inputs().size() == 1 && source != found.end() &&
                          !isWindowed(op.kind()) && !isSoftmax(op.kind()) &&
                          op.kind() != OpKind::LayerNorm;
      const auto kind = passes ? source->second : op.kind();
      for (const auto& output : op.outputs()) {
        found.emplace(output.id, kind);
      }
    }
    return found;
  }

  // Whether our kernels for products have it not, while a pass of its own takes less time than
  // oneDNN's kernels do more.
  static bool isFunctionApart(const OpSpec& op) {
    const auto kind = op.kind();
    return kind == OpKind::LeakyReLU || kind == OpKind::Elu || kind == OpKind::Mish ||
           kind == OpKind::SoftPlus ||
           (kind == OpKind::Clamp && rectifierOf(op) == Rectifier::none);
  }

  static bool isWindowed(OpKind kind) {
    return kind == OpKind::AvgPool || kind == OpKind::MaxPool || kind == OpKind::Interpolate;
  }

  static bool isSoftmax(OpKind kind) {
    return kind == OpKind::SoftMax || kind == OpKind::LogSoftmax;
  }

  // Whether oneDNN, 3.2 as 3.7, reads numbers of the operand in wrong places, and beyond its end,
  // when it is fused to what gives the value. Poolings and resizings take it for as channels last
  // as they compute; a softmax for whole; a binary op confuses channels and images of one pixel
  // each.
  static bool isMisread(const Operand& operand, const Operand& value, OpKind root) {
    if (isWindowed(root)) {
      return true;
    }
    if (!operand.sizes || !value.sizes || operand.sizes == value.sizes) {
      return false;
    }
    return isSoftmax(root) || (isBinary(root) && isOnePixel(*value.sizes) &&
                               c10::multiply_integers(*operand.sizes) != 1);
  }

  // Whether oneDNN 3.7 forgets to add the operand: behind a layer norm, and a cast of it, it takes
  // a tensor of the same sizes for a sum, which its layer norms know nothing of.
  static bool isLeftOut(const OpSpec& op, const Operand& operand, const Operand& value,
                        OpKind root) {
    return op.kind() == OpKind::Add && root == OpKind::LayerNorm && operand.sizes == value.sizes;
  }

  static bool isSoftmaxOfRows(const OpSpec& op) {
    if (!isSoftmax(op.kind())) {
      return false;
    }
    const auto axis = op.get_attr<int64_t>(Attr::axis);
    return axis == -1 || axis + 1 == static_cast<int64_t>(op.inputs()[0].sizes->size());
  }

  // Over another dimension than the last. Between two products oneDNN 3.7 takes it for attention,
  // whose softmax is over the last one.
  static bool isSoftmaxAcross(const OpSpec& op) {
    return op.kind() == OpKind::SoftMax && !isSoftmaxOfRows(op);
  }

  // oneDNN adds a tensor behind another op by writing over it. Where it can't, because the tensor
  // is not the group's own, it works on a copy, which takes longer than an addition.
  bool isCopiedToAdd(const Operand& addend, const Operand& value) const {
    const auto input = draft_.group_inputs.find(addend.id);
    return input != draft_.group_inputs.end() && !draft_.request.owned_inputs[input->second] &&
           addend.sizes == value.sizes;
  }

  // In float32 a linear layer of one row takes as long as its weight is read. Our own kernel knows
  // nothing of another tensor, and what it gives is a few numbers, which another one has in no
  // time.
  bool isAppliedToOneRow(const Operand& product, const Operand& operand) const {
    const auto& sizes = product.sizes;
    return product.dtype == at::kFloat && sizes && !sizes->empty() &&
           c10::multiply_integers(sizes->begin(), sizes->end() - 1) == 1 &&
           draft_.lowered.constants.count(operand.id) == 0;
  }

  // The gemm for AVX2 takes a second operand whole, by columns or as one number; with others comes
  // the reference kernel.
  static bool addsToGemm(const Operand& operand, const Operand& product) {
    if (!operand.sizes || !product.sizes) {
      return true;
    }
    const auto& sizes = *operand.sizes;
    return sizes == *product.sizes || sizes.empty() ||
           c10::multiply_integers(sizes.begin(), sizes.end() - 1) == 1;
  }

  // oneDNN, 3.2 as 3.7, multiplies by a matrix in two dimensions and folds the leading ones of the
  // data, and of what is fused to the product, into rows.
  static bool isFolded(const OpSpec& op) {
    const auto rank = [&](size_t i) {
      const auto& sizes = op.inputs()[i].sizes;
      return sizes ? sizes->size() : 0;
    };
    return op.kind() == OpKind::MatMul && rank(0) > 2 && rank(1) == 2;
  }

  // Whether each row of the operand still meets its row of the product then: the operand has all of
  // them, or one.
  static bool foldsLike(const Operand& product, const Operand& operand) {
    if (!operand.sizes || !product.sizes || operand.sizes->empty()) {
      return true;
    }
    const auto& sizes = *operand.sizes;
    const auto& all = *product.sizes;
    return c10::multiply_integers(sizes.begin(), sizes.end() - 1) == 1 ||
           (sizes.size() == all.size() && std::equal(sizes.begin(), sizes.end() - 1, all.begin()));
  }

  static std::vector<dnnl::graph::partition> inOrder(std::vector<dnnl::graph::partition> found) {
    std::unordered_set<size_t> pending;
    for (auto& partition : found) {
      for (const auto& port : partition.get_output_ports()) {
        pending.insert(port.get_id());
      }
    }
    std::vector<dnnl::graph::partition> ordered;
    while (!found.empty()) {
      const auto ready = std::find_if(found.begin(), found.end(), [&](auto& partition) {
        const auto ports = partition.get_input_ports();
        return std::none_of(ports.begin(), ports.end(),
                            [&](const Layout& port) { return pending.count(port.get_id()) != 0; });
      });
      if (ready == found.end()) {
        throw CompileError{"oneDNN returned partitions that depend on each other"};
      }
      for (const auto& port : ready->get_output_ports()) {
        pending.erase(port.get_id());
      }
      ordered.push_back(std::move(*ready));
      found.erase(ready);
    }
    return ordered;
  }

  void add(const dnnl::graph::partition& partition, const Ops& ops) {
    const auto& way_of = draft_.request.way_of;
    if (!way_of) {
      return add(partition, ops, Way::usual);
    }
    auto key = partitionKey(draft_, ops);
    const auto known = way_of(key);
    const auto ports = partition.get_input_ports();
    const bool copies = std::any_of(ports.begin(), ports.end(), [&](const Layout& port) {
      const auto layout = draft_.inputLayout(port.get_id());
      return !needsRowMajor(ops, layout) && usualOrder(layout);
    });
    add(partition, ops, known.value_or(Way::usual));
    std::vector<Way> others;
    if (!known) {
      others = otherWays(ops, copies);
    }
    auto& plan = *draft_.plan;
    plan.parts.push_back({std::move(key), plan.steps.size(), std::move(others)});
  }

  void add(const dnnl::graph::partition& partition, const Ops& ops, Way way) {
    draft_.pack = pack_ && way != Way::onednn_plain;
    if (!addOwnStep(draft_, ops, way)) {
      compile(partition, ops, way);
    }
  }

  // What there is for a partition whose steps have just been added in the usual way.
  std::vector<Way> otherWays(const Ops& ops, bool copies) const {
    std::vector<Way> ways;
    if (draft_.appliedTo(ops.front()->inputs()[0].id) != nullptr) {
      return ways;  // works in place
    }
    const bool own = static_cast<bool>(draft_.plan->steps.back().kernel.run);
    if (own) {
      ways.push_back(Way::onednn);
    } else if (linear(ops, draft_.lowered, Way::gemm)) {
      ways.push_back(Way::gemm);
    }
    for (const auto way : {Way::winograd2, Way::winograd4}) {
      if (winogradConvolution(ops, draft_.lowered, way)) {
        ways.push_back(way);
      }
    }
    const bool packed = std::any_of(ops.begin(), ops.end(), [&](const OpSpec* op) {
      const auto& inputs = op->inputs();
      return std::any_of(inputs.begin(), inputs.end(), [&](const Operand& input) {
        return draft_.lowered.packable.count(input.id) != 0;
      });
    });
    if (packed && pack_) {
      ways.push_back(Way::onednn_plain);
    }
    if (copies) {
      ways.push_back(Way::onednn_copied);
    }
    return ways;
  }

  // Dilated convolutions of 8 bit, where oneDNN 3.7 with AMX writes beyond the end of its memory
  // (64 channels of 32 x 32 pixels, dilated by 2).
  static bool writesTooMuch(const Ops& ops) {
    constexpr bool kNewer = DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR > 2;
    return kNewer && usesAmx() && std::any_of(ops.begin(), ops.end(), [&](const OpSpec* op) {
             if (op->kind() != OpKind::Convolution) {
               return false;
             }
             const auto dilations = op->get_attr<Shape>(Attr::dilations);
             const bool dilated = std::any_of(dilations.begin(), dilations.end(),
                                              [](int64_t dilation) { return dilation != 1; });
             return dilated && std::any_of(ops.begin(), ops.end(), [&](const OpSpec* other) {
                      return other->kind() == OpKind::Dequantize &&
                             other->outputs()[0].id == op->inputs()[0].id;
                    });
           });
  }

  void compile(const dnnl::graph::partition& partition, const Ops& ops, Way way) {
    if (writesTooMuch(ops)) {
      throw CompileError{"oneDNN 3.7 writes beyond its memory in dilated convolutions of 8 bit"};
    }
    std::vector<Layout> inputs;
    std::vector<Layout> outputs;
    std::unordered_map<size_t, Slot> copies;
    for (const auto& port : partition.get_input_ports()) {
      const auto id = port.get_id();
      inputs.push_back(draft_.inputLayout(id));
      if (isConvolutionOfPlanes(ops, inputs.back()) && draft_.knownSlot(id) &&
          mayBeChannelsLast(ops.back()->outputs()[0])) {
        std::tie(copies[id], inputs.back()) = addInterleaved(draft_, inputs.back());
      } else if (const auto strides = orderToCopyTo(ops, inputs.back(), way)) {
        std::tie(copies[id], inputs.back()) = copied(inputs.back(), *strides);
      }
    }
    for (const auto& port : partition.get_output_ports()) {
      outputs.push_back(draft_.outputLayout(port.get_id()));
    }
    if (std::all_of(inputs.begin(), inputs.end(), [&](const Layout& input) {
          return draft_.layouts.count(input.get_id()) == 0 &&
                 draft_.group_inputs.count(input.get_id()) == 0;
        })) {
      // oneDNN would compute it in the first call and leave the results of later ones unwritten.
      throw CompileError{"all that a partition reads are constants"};
    }
    Plan::Step step;
    step.compiled = partition.compile(inputs, outputs, engine());
    for (const auto& input : inputs) {
      const auto copy = copies.find(input.get_id());
      step.inputs.push_back(copy == copies.end() ? bindInput(step.compiled, input)
                                                 : std::pair(copy->second, input));
    }
    for (const auto& output : outputs) {
      const auto id = output.get_id();
      const bool chosen = output.get_layout_type() == LayoutType::any;
      draft_.addResult(step, chosen ? chosenLayout(step.compiled, id) : output);
    }
    for (const auto& [input, output] : step.compiled.get_inplace_ports()) {
      draft_.inplace[output] = input;
    }
    draft_.plan->kept |= KeptArguments::of(ops, [](const OpSpec& op) { return op.kind(); });
    draft_.plan->steps.push_back(std::move(step));
  }

  // That of a result which could have any.
  static Layout chosenLayout(const dnnl::graph::compiled_partition& compiled, size_t id) {
    const auto chosen = compiled.query_logical_tensor(id);
    if (isOpaque(chosen)) {  // not on CPU, by all of its releases that this was tried with
      throw CompileError{"oneDNN chose an opaque layout for a result"};
    }
    const auto sizes = chosen.get_dims();
    return logical_tensor(id, chosen.get_data_type(), sizes,
                          canonicalStrides(sizes, chosen.get_strides()),
                          chosen.get_property_type());
  }

  // What a kernel does badly in another order of dimensions than its own. An operand that it takes
  // beside its own: oneDNN 3.7 adds it to a matrix product as if it were row-major. The data of a
  // layer norm, a reduction or a softmax over rows that do not lie together, a factor whose
  // matrices lie neither by rows nor by columns, and without AVX-512 one whose matrices do not lie
  // one behind the other: reference kernels take them, at a hundred times the cost of a copy.
  static bool needsRowMajor(const Ops& ops, const Layout& layout) {
    if (layout.get_layout_type() != LayoutType::strided) {
      return false;
    }
    const auto sizes = layout.get_dims();
    const auto strides = layout.get_strides();
    if (sizes.size() < 2 || strides == c10::TensorType::contiguousStridesOf(sizes)) {
      return false;
    }
    bool operand = false;
    bool slow = false;
    bool product = false;
    const auto id = layout.get_id();
    for (const auto* op : ops) {
      const auto kind = op->kind();
      const auto& inputs = op->inputs();
      const bool reads = std::any_of(inputs.begin(), inputs.end(),
                                     [&](const Operand& input) { return input.id == id; });
      product = product || kind == OpKind::MatMul;
      operand = operand || (reads && isBinary(kind));
      slow = slow ||
             (inputs.front().id == id && (kind == OpKind::LayerNorm || isReduction(kind))) ||
             (inputs.front().id == id && isSoftmaxOfRows(*op) && strides.back() != 1) ||
             (reads && kind == OpKind::MatMul &&
              (usesAvxGemm() ? !holdsMatrices(sizes, strides) : !liesByLines(sizes, strides)));
    }
    const bool image = !product && strides == channelsLastStrides(sizes);
    return slow || (operand && !image && ops.size() > 1);
  }

  // Matrices anywhere, each by rows or by columns.
  static bool liesByLines(const Shape& sizes, const Shape& strides) {
    const auto isLine = [&](size_t i) { return sizes[i] == 1 || strides[i] == 1; };
    return isLine(sizes.size() - 1) || isLine(sizes.size() - 2);
  }

  // Matrices one behind the other, each by rows or by columns.
  static bool holdsMatrices(Shape sizes, Shape strides) {
    if (strides.back() != 1) {
      std::swap(sizes.end()[-1], sizes.end()[-2]);
      std::swap(strides.end()[-1], strides.end()[-2]);
    }
    return strides == c10::TensorType::contiguousStridesOf(sizes);
  }

  static bool isReduction(OpKind kind) {
    switch (kind) {
      case OpKind::ReduceL1:
      case OpKind::ReduceL2:
      case OpKind::ReduceMax:
      case OpKind::ReduceMean:
      case OpKind::ReduceMin:
      case OpKind::ReduceSum:
        return true;
      default:
        return false;
    }
  }

  static bool isBinary(OpKind kind) {
    switch (kind) {
      case OpKind::Add:
      case OpKind::Subtract:
      case OpKind::Multiply:
      case OpKind::Divide:
      case OpKind::Maximum:
      case OpKind::Minimum:
        return true;
      default:
        return false;
    }
  }

  // The strides of the copy of an operand that a partition takes in its place, if any.
  static std::optional<Shape> orderToCopyTo(const Ops& ops, const Layout& layout, Way way) {
    if (needsRowMajor(ops, layout)) {
      return c10::TensorType::contiguousStridesOf(layout.get_dims());
    }
    if (layout.get_layout_type() == LayoutType::strided &&
        hasGaps(layout.get_dims(), layout.get_strides())) {
      return at::infer_dense_strides(layout.get_dims(), layout.get_strides());
    }
    return way == Way::onednn_copied ? usualOrder(layout) : std::nullopt;
  }

  // By rows, where data lies in another order that is not channels last either. (Images in their
  // order oneDNN copies by itself where that is worth it.)
  static std::optional<Shape> usualOrder(const Layout& layout) {
    if (layout.get_layout_type() != LayoutType::strided ||
        layout.get_property_type() == logical_tensor::property_type::constant) {
      return std::nullopt;
    }
    const auto sizes = layout.get_dims();
    const auto strides = layout.get_strides();
    auto rows = c10::TensorType::contiguousStridesOf(sizes);
    const bool usual = strides == rows || strides == channelsLastStrides(sizes);
    return usual ? std::nullopt : std::optional(std::move(rows));
  }

  bool mayBeChannelsLast(const Operand& result) const {
    return result.sizes && draft_.mayHaveStrides(result.id, channelsLastStrides(*result.sizes));
  }

  // A step that copies an operand; where the copy will be, and its layout.
  std::pair<Slot, Layout> copied(const Layout& from, const Shape& strides) {
    const auto id = from.get_id();
    const auto to = logical_tensor(next_id_++, from.get_data_type(), from.get_dims(), strides);
    const dnnl::graph::op reorder(next_id_++, OpKind::Reorder, {from}, {to}, "copy");
    const dnnl::graph::partition partition(reorder, dnnl::engine::kind::cpu);
    Plan::Step step;
    step.compiled = partition.compile({from}, {to}, engine());
    step.inputs.push_back(bindInput(step.compiled, from));
    const auto slot = draft_.temporary(to);
    step.outputs.emplace_back(slot, to);
    draft_.plan->kept |= KeptArguments::usual();
    draft_.plan->steps.push_back(std::move(step));
    return {slot, withId(to, id)};
  }

  std::pair<Slot, Layout> bindInput(const dnnl::graph::compiled_partition& compiled,
                                    const Layout& input) {
    const auto id = input.get_id();
    if (const auto slot = draft_.knownSlot(id)) {
      return {*slot, input};
    }
    if (input.get_layout_type() == LayoutType::any) {
      const auto layout = withId(compiled.query_logical_tensor(id), id);
      auto weight = draft_.constantTensor(id);
      const auto placement = placementOf(id, layout);
      if (placement == Placement::unaligned || !layout.is_equal(withId(layoutOf(weight), id))) {
        auto packed = packWeight(weight, layout, placement);
        if (const auto releasable = findReleasable(weight)) {
          releasable->packedAs(weight, layout, packed);
        }
        auto* data = packed->data();
        draft_.plan->packed.push_back(std::move(packed));
        return {draft_.constantSlot(data), layout};
      }
      return {draft_.keep(std::move(weight)), layout};
    }
    return {draft_.keep(draft_.constantTensor(id)), input};
  }

  // The gemm for AVX2 reads the weight of up to 262 rows of data in place if its address and rows
  // are aligned to 32 bytes. Where rows are apart by a large power of two that is a cache miss for
  // each: a product of 128 x 768 x 3072 takes 1.7 times as long as with an address that makes it
  // copy the weight to panels first. For few rows the copy does not pay.
  Placement placementOf(size_t id, const Layout& layout) const {
    constexpr int64_t kFewRows = 32;
    constexpr int64_t kManyRows = 263;
    constexpr int64_t kBadStride = 512;  // floats: half a page
    if (!usesAvxGemm() || isOpaque(layout) || layout.get_data_type() != DataType::f32) {
      return Placement::aligned;
    }
    const auto strides = layout.get_strides();
    if (strides.size() != 2 || strides[1] != 1 || strides[0] % kBadStride != 0) {
      return Placement::aligned;
    }
    for (const auto& op : draft_.lowered.ops) {
      const auto& inputs = op.inputs();
      if (op.kind() == OpKind::MatMul && inputs[1].id == id && inputs[0].sizes) {
        const auto rows = c10::multiply_integers(*inputs[0].sizes) / layout.get_dims()[0];
        return rows >= kFewRows && rows < kManyRows ? Placement::unaligned : Placement::aligned;
      }
    }
    return Placement::aligned;
  }

  PlanDraft draft_;
  const bool pack_;
  size_t next_id_ = size_t{1} << 32;
};

}  // namespace

std::shared_ptr<const Plan> compilePlan(const CompileRequest& request) {
  constexpr size_t kMuch = size_t{1} << 20;
  const auto packed = packedBytes();
  std::shared_ptr<const Plan> plan;
  const auto unpacked = [&] { return PlanCompiler(request, /*pack=*/false).run(); };
  try {
    try {
      plan = PlanCompiler(request, /*pack=*/true).run();
    } catch (const PackError&) {
      plan = unpacked();
    } catch (const dnnl::error&) {  // 3.2 scales no packed weight, as for a batch norm behind it
      plan = unpacked();
    }
  } catch (const dnnl::error& error) {
    throw CompileError{fmt::format("oneDNN: {}", error.what())};
  }
#ifdef __GLIBC__
  if (packedBytes() >= packed + kMuch) {
    malloc_trim(0);  // packing needs several times a weight's memory, which glibc would keep
  }
#endif
  return plan;
}

Description describePlan(const CompileRequest& request, const std::vector<Shape>& output_strides) {
  try {
    return PlanCompiler(request, /*pack=*/true).describe(output_strides);
  } catch (const dnnl::error& error) {
    throw CompileError{fmt::format("oneDNN: {}", error.what())};
  }
}

}  // namespace llga
