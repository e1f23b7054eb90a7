#include "jit/onednn/runtime/compile.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>
#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "jit/onednn/ops/op_table.h"
#include "jit/onednn/runtime/channel_shuffle.h"
#include "jit/onednn/runtime/concat_affine.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/own_kernels.h"
#include "jit/onednn/runtime/releasable_weights.h"

namespace llga {
namespace {

using dnnl::graph::logical_tensor;
using LayoutType = logical_tensor::layout_type;
using Property = logical_tensor::property_type;
namespace prim = torch::jit::prim;

// Strides of dimensions of size 1 are arbitrary in PyTorch; oneDNN recognises a format by all.
Shape canonicalStrides(const Shape& sizes, const Shape& strides) {
  auto matches = [&](const Shape& wanted) {
    for (const auto i : c10::irange(sizes.size())) {
      if (sizes[i] != 1 && strides[i] != wanted[i]) {
        return false;
      }
    }
    return true;
  };
  auto contiguous = c10::TensorType::contiguousStridesOf(sizes);
  if (matches(contiguous)) {
    return contiguous;
  }
  auto channels_last = channelsLastStrides(sizes);
  return !channels_last.empty() && matches(channels_last) ? channels_last : strides;
}

Layout strided(size_t id, at::ScalarType dtype, const Shape& sizes, const Shape& strides,
               bool constant = false) {
  const auto property = constant ? Property::constant : Property::variable;
  if (sizes.empty()) {
    return logical_tensor(id, *toDataType(dtype), Shape{1}, Shape{1}, property);
  }
  return logical_tensor(id, *toDataType(dtype), sizes, canonicalStrides(sizes, strides), property);
}

Layout any(size_t id, at::ScalarType dtype, const Shape& sizes, bool constant) {
  return logical_tensor(id, *toDataType(dtype), sizes, LayoutType::any,
                        constant ? Property::constant : Property::variable);
}

class PlanCompiler {
 public:
  // `pack`: let oneDNN choose the layout of constant weights.
  PlanCompiler(const CompileRequest& request, bool pack)
      : request_(request), pack_(pack), plan_(std::make_shared<Plan>()) {}

  std::shared_ptr<const Plan> run() {
    indexValues();
    if (const auto shuffle = findShuffle(*request_.subgraph, *request_.facts)) {
      channelShuffle(*shuffle);
      return finished();
    }
    lower();
    if (!concatAffine() && !squeezeExcitation() && !wholeActivation()) {
      for (const auto& partition : partitions()) {
        const auto ops = opsOf(partition);
        if (!groupedConvolution(ops) && !winograd(ops) && !linear(ops) && !activation(ops)) {
          compile(partition, ops);
        }
      }
    }
    return finished();
  }

  Description describe(const std::vector<Shape>& output_strides) {
    Description result;
    result.fpmath_mode = request_.fpmath_mode;
    if (findShuffle(*request_.subgraph, *request_.facts)) {
      return result;  // nothing of it is oneDNN's
    }
    indexValues();
    lower();
    for (const auto& partition : partitions()) {
      auto& part = result.partitions.emplace_back();
      std::unordered_map<size_t, Layout> ports;
      for (const auto& port : partition.get_input_ports()) {
        part.inputs.push_back(port.get_id());
        ports.emplace(port.get_id(), inputLayout(port.get_id()));
      }
      for (const auto& port : partition.get_output_ports()) {
        const auto id = port.get_id();
        auto layout = outputLayout(id);
        if (const auto it = group_outputs_.find(id); it != group_outputs_.end()) {
          const auto& operand = lowered_.operands.at(id);
          layout = strided(id, operand.dtype, *operand.sizes, output_strides.at(it->second));
          result.group_outputs.emplace(id, it->second);
        } else if (const auto* applied = appliedTo(id)) {
          layout = strided(id, at::kFloat, *lowered_.operands.at(id).sizes,
                           output_strides.at(group_outputs_.at(applied->to)));
        }
        part.outputs.push_back(id);
        ports.emplace(id, layout);
        layouts_.insert_or_assign(id, layout);
      }
      for (const auto* spec : opsOf(partition)) {
        part.ops.push_back(describeOp(*spec, ports));
      }
      for (const auto id : part.inputs) {
        if (const auto it = group_inputs_.find(id); it != group_inputs_.end()) {
          result.group_inputs.emplace(id, it->second);
        } else if (lowered_.operands.at(id).constant) {
          result.constants.emplace(id, constantMaker(id));
        }
      }
    }
    return result;
  }

 private:
  std::shared_ptr<const Plan> finished() {
    plan_->outputs.resize(request_.subgraph->outputs().size());
    for (const auto i : c10::irange(plan_->outputs.size())) {
      describeOutput(i);
    }
    plan_->binaries_apart = request_.binaries_apart;
    plan_->prepare();
    return plan_;
  }

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
    if (const auto it = lowered_.constants.find(id); it != lowered_.constants.end()) {
      return it->second;
    }
    return [tensor = constantTensor(id)] { return tensor; };
  }

  void lower() {
    for (const auto* node : request_.subgraph->nodes()) {
      if (node->kind() == prim::Constant || node->kind() == prim::ListConstruct ||
          isShapeArithmetic(node) || isQuantizedConstant(node)) {
        continue;
      }
      if (node->kind() == asTargetKind()) {
        if (request_.facts->tensor(node->input(0)).dtype !=
            request_.facts->tensor(node->output()).dtype) {
          throw CompileError{"an in-place op converts its result to the data type of its target"};
        }
        continue;
      }
      const auto* entry = findOp(node);
      if (entry == nullptr) {
        throw CompileError{qualifiedName(node) + ": not in the op table"};
      }
      try {
        Lowering lowering(node, *request_.facts, next_id_);
        entry->lower(lowering);
        std::move(lowering).commit(lowered_);
      } catch (const Refused& refused) {
        throw CompileError{refused.reason};
      }
    }
  }

  void indexValues() {
    const auto& subgraph = *request_.subgraph;
    for (const auto i : c10::irange(subgraph.inputs().size())) {
      group_inputs_[subgraph.inputs()[i]->unique()] = i;
    }
    for (const auto i : c10::irange(subgraph.outputs().size())) {
      group_outputs_.emplace(behind(subgraph.outputs()[i])->unique(), i);
    }
  }

  // The partitions in an order in which each finds its inputs computed.
  std::vector<dnnl::graph::partition> partitions() {
    dnnl::graph::graph graph(dnnl::engine::kind::cpu, request_.fpmath_mode);
    std::unordered_set<size_t> open;
    for (const auto& emitted : lowered_.ops) {
      graph.add_op(emitted.build());
      open.insert(emitted.id());
    }
    // Without a reader outside, oneDNN would keep a value that others in the group read.
    auto read = [&](size_t id) {
      dnnl::graph::op end(next_id_++, OpKind::End, "output");
      end.add_input(lowered_.operands.at(id).logicalTensor());
      graph.add_op(end);
    };
    for (const auto& [id, index] : group_outputs_) {
      read(id);
    }
    for (const auto id : cuts()) {
      read(id);
    }
    activations_ = activationsApart(lowered_, group_outputs_);
    for (const auto& applied : activations_) {
      read(applied.from);
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
    std::erase_if(activations_, [&](const ActivationApart& applied) {
      return std::none_of(found.begin(), found.end(), [&](const dnnl::graph::partition& partition) {
        return opsOf(partition) == applied.ops;
      });
    });
    return inOrder(std::move(found));
  }

  // In the order of the subgraph.
  Ops opsOf(const dnnl::graph::partition& partition) const {
    const auto members = partition.get_ops();
    Ops ops;
    for (const auto& op : lowered_.ops) {
      if (std::find(members.begin(), members.end(), op.id()) != members.end()) {
        ops.push_back(&op);
      }
    }
    return ops;
  }

  // The one that is applied to this value; nullptr if there is none.
  const ActivationApart* appliedTo(size_t id) const {
    const auto it =
        std::find_if(activations_.begin(), activations_.end(),
                     [id](const ActivationApart& applied) { return applied.from == id; });
    return it == activations_.end() ? nullptr : &*it;
  }

  // Values that are not fused to the binary op that reads them.
  std::unordered_set<size_t> cuts() const {
    const auto producers = producerKinds(lowered_);
    const bool product = std::any_of(lowered_.ops.begin(), lowered_.ops.end(),
                                     [](const OpSpec& op) { return op.kind() == OpKind::MatMul; });
    std::unordered_set<size_t> found;
    for (const auto& op : lowered_.ops) {
      if (!isBinary(op.kind())) {
        continue;
      }
      for (const auto i : {0, 1}) {
        const auto& value = op.inputs()[i];
        const auto& other = op.inputs()[1 - i];
        const auto producer = producers.find(value.id);
        if (producer == producers.end() || group_outputs_.count(value.id) != 0) {
          continue;
        }
        if (request_.binaries_apart || (product && usesAvxGemm() && !addsToGemm(other, value)) ||
            (op.kind() == OpKind::Add && isBinary(producer->second) &&
             isCopiedToAdd(other, value))) {
          found.insert(value.id);
        }
      }
    }
    return found;
  }

  // oneDNN adds a tensor behind another op by writing over it. Where it can't, because the tensor
  // is not the group's own, it works on a copy, which takes longer than an addition.
  bool isCopiedToAdd(const Operand& addend, const Operand& value) const {
    const auto input = group_inputs_.find(addend.id);
    return input != group_inputs_.end() && !request_.owned_inputs[input->second] &&
           addend.sizes == value.sizes;
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

  void compile(const dnnl::graph::partition& partition, const Ops& ops) {
    std::vector<Layout> inputs;
    std::vector<Layout> outputs;
    std::unordered_map<size_t, Slot> copies;
    for (const auto& port : partition.get_input_ports()) {
      const auto id = port.get_id();
      inputs.push_back(inputLayout(id));
      if (needsRowMajor(ops, inputs.back())) {
        std::tie(copies[id], inputs.back()) = rowMajor(inputs.back());
      }
    }
    for (const auto& port : partition.get_output_ports()) {
      outputs.push_back(outputLayout(port.get_id()));
    }
    if (std::all_of(inputs.begin(), inputs.end(), [&](const Layout& input) {
          return layouts_.count(input.get_id()) == 0 && group_inputs_.count(input.get_id()) == 0;
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
      auto layout = output.get_layout_type() == LayoutType::any
                        ? withId(step.compiled.query_logical_tensor(id), id)
                        : output;
      if (isOpaque(layout)) {  // not on CPU, by all of its releases that this was tried with
        throw CompileError{"oneDNN chose an opaque layout for a result"};
      }
      layouts_.insert_or_assign(id, layout);
      step.outputs.emplace_back(resultSlot(id, layout), layout);
    }
    for (const auto& [input, output] : step.compiled.get_inplace_ports()) {
      inplace_[output] = input;
    }
    plan_->steps.push_back(std::move(step));
  }

  // A step for a convolution in small groups over channels-last images, by a kernel of our own.
  // False for any other partition.
  bool groupedConvolution(const Ops& ops) {
    const auto kernel = slowGroupedConvolution(ops, lowered_);
    const auto& inputs = ops[0]->inputs();
    const auto& data = inputs[0];
    const auto& result = ops.back()->outputs()[0];
    if (!kernel || !overChannelsLast(data, result)) {
      return false;
    }
    const auto weight = constantTensor(inputs[1].id).contiguous();
    if (!weight.isfinite().all().item<bool>()) {  // in the padding, the others make NaN of zeros
      return false;
    }
    Plan::Step step;
    step.inputs.emplace_back(*knownSlot(data.id), inputLayout(data.id));
    const auto packed_layout = logical_tensor(inputs[1].id, DataType::f32, kernel->weightSizes(),
                                              kernel->weightStrides(), Property::constant);
    if (const auto releasable = findReleasable(weight)) {
      releasable->pin();
    }
    auto packed = packWeight(weight.view(kernel->weightSizes()), packed_layout, Placement::aligned);
    step.inputs.emplace_back(constantSlot(packed->data()), packed_layout);
    plan_->packed.push_back(std::move(packed));
    const bool bias = inputs.size() == 3;
    if (bias) {
      step.inputs.emplace_back(keep(constantTensor(inputs[2].id).contiguous()),
                               inputLayout(inputs[2].id));
    }
    addChannelsLastResult(step, result);
    step.kernel = {[kernel = *kernel, bias](auto from, auto to) {
                     kernel.run(static_cast<const float*>(from[0]),
                                static_cast<const float*>(from[1]),
                                bias ? static_cast<const float*>(from[2]) : nullptr,
                                static_cast<float*>(to[0]));
                   },
                   "convolution", "llga_grouped:avx2"};
    plan_->steps.push_back(std::move(step));
    return true;
  }

  // A step for a convolution, and maybe an addition and ReLU, over channels-last images by
  // Winograd's algorithm. False for any other partition.
  bool winograd(const Ops& ops) {
    const auto found = winogradConvolution(ops, lowered_);
    const auto& inputs = ops[0]->inputs();
    const auto& data = inputs[0];
    const auto& result = ops.back()->outputs()[0];
    if (!found || request_.fpmath_mode != dnnl::fpmath_mode::strict ||
        !overChannelsLast(data, result)) {
      return false;
    }
    if (found->addend &&
        (!knownSlot(*found->addend) || !isChannelsLast(inputLayout(*found->addend), result))) {
      return false;
    }
    constexpr double kLarge = 1e30;  // sums of a few such numbers are finite
    const auto weight = constantTensor(inputs[1].id).contiguous();
    if (findReleasable(weight) || !(weight.abs().max().item<double>() < kLarge)) {
      return false;
    }
    const auto& kernel = found->kernel;
    Plan::Step step;
    auto bind = [&](const Slot& slot, const Layout& layout) {
      step.inputs.emplace_back(slot, layout);
      return step.inputs.size() - 1;
    };
    bind(*knownSlot(data.id), inputLayout(data.id));
    auto transformed =
        transformWeight(weight, kernel.weightSizes(), [&] { return kernel.transformed(weight); });
    bind(constantSlot(transformed->data()), inputLayout(inputs[1].id));
    plan_->packed.push_back(std::move(transformed));
    size_t bias = 0;
    if (inputs.size() == 3) {
      bias = bind(keep(constantTensor(inputs[2].id).contiguous()), inputLayout(inputs[2].id));
    }
    size_t addend = 0;
    if (found->addend) {
      addend = bind(*knownSlot(*found->addend), inputLayout(*found->addend));
      inplace_[result.id] = *found->addend;
    }
    addChannelsLastResult(step, result);
    step.kernel = {[kernel, weight, bias, addend](auto from, auto to) {
                     auto data = [&](size_t i) { return static_cast<const float*>(from[i]); };
                     kernel.run({data(0), data(1), weight.template const_data_ptr<float>(),
                                 bias != 0 ? data(bias) : nullptr,
                                 addend != 0 ? data(addend) : nullptr, static_cast<float*>(to[0])});
                   },
                   "convolution", fmt::format("llga_winograd:{}", kernel.isa())};
    plan_->steps.push_back(std::move(step));
    return true;
  }

  static bool isChannelsLast(const Layout& layout, const Operand& like) {
    return layout.get_layout_type() == LayoutType::strided &&
           layout.get_strides() == channelsLastStrides(*like.sizes);
  }

  // The images are, and the result may be.
  bool overChannelsLast(const Operand& data, const Operand& result) const {
    const auto layout = outputLayout(result.id);
    return isChannelsLast(inputLayout(data.id), data) &&
           (layout.get_layout_type() == LayoutType::any || isChannelsLast(layout, result));
  }

  void addChannelsLastResult(Plan::Step& step, const Operand& result) {
    const auto layout =
        strided(result.id, result.dtype, *result.sizes, channelsLastStrides(*result.sizes));
    layouts_.insert_or_assign(result.id, layout);
    step.outputs.emplace_back(resultSlot(result.id, layout), layout);
  }

  // A step for a linear layer. False for any other partition.
  bool linear(const Ops& ops) {
    const auto found = llga::linear(ops, lowered_);
    if (!found || !knownSlot(found->data.id) || !isContiguous(inputLayout(found->data.id)) ||
        (found->addend &&
         (!knownSlot(*found->addend) || !isContiguous(inputLayout(*found->addend))))) {
      return false;
    }
    const auto& result = found->result;
    const auto wanted = outputLayout(result.id);
    if (wanted.get_layout_type() != LayoutType::any && !isContiguous(wanted)) {
      return false;
    }
    Plan::Step step;
    auto bind = [&](const Slot& slot, const Layout& layout) {
      step.inputs.emplace_back(slot, layout);
      return step.inputs.size() - 1;
    };
    bind(*knownSlot(found->data.id), inputLayout(found->data.id));
    const auto weight = constantTensor(found->weight.id);
    const auto inputs = weight.size(0);
    const auto outputs = weight.size(1);
    const bool row = found->rows == 1;
    const Linear kernel{found->rows, inputs, outputs, found->rectifier == Rectifier::relu};
    if (row) {
      if (!weight.t().is_contiguous()) {
        return false;
      }
      bind(keep(weight), strided(found->weight.id, at::kFloat, {inputs, outputs}, {1, inputs},
                                 /*constant=*/true));
    } else {
      if (findReleasable(weight)) {
        return false;
      }
      auto panels =
          transformWeight(weight, kernel.weightSizes(), [&] { return kernel.panels(weight); });
      bind(constantSlot(panels->data()), inputLayout(found->weight.id));
      plan_->packed.push_back(std::move(panels));
    }
    size_t bias = 0;
    if (found->bias) {
      const auto tensor = constantTensor(found->bias->id).contiguous();
      bias = bind(keep(tensor), strided(found->bias->id, at::kFloat, tensor.sizes().vec(),
                                        tensor.strides().vec(), /*constant=*/true));
    }
    size_t addend = 0;
    if (found->addend) {
      addend = bind(*knownSlot(*found->addend), inputLayout(*found->addend));
      inplace_[result.id] = *found->addend;
    }
    const auto layout = strided(result.id, at::kFloat, *result.sizes,
                                c10::TensorType::contiguousStridesOf(*result.sizes));
    layouts_.insert_or_assign(result.id, layout);
    step.outputs.emplace_back(resultSlot(result.id, layout), layout);
    step.kernel = {[kernel, row, bias, addend, rectifier = found->rectifier](auto from, auto to) {
                     auto data = [&](size_t i) {
                       return i != 0 ? static_cast<const float*>(from[i]) : nullptr;
                     };
                     const auto* source = static_cast<const float*>(from[0]);
                     auto* result = static_cast<float*>(to[0]);
                     if (row) {
                       gemv(data(1), data(bias), kernel.outputs, kernel.inputs, source, result,
                            rectifier);
                     } else {
                       kernel.run({source, data(1), data(bias), data(addend), result});
                     }
                   },
                   "matmul", row ? "llga_gemv:avx2" : "llga_gemm:avx2"};
    plan_->steps.push_back(std::move(step));
    return true;
  }

  static bool isContiguous(const Layout& layout) {
    return layout.get_layout_type() == LayoutType::strided &&
           layout.get_strides() == c10::TensorType::contiguousStridesOf(layout.get_dims());
  }

  // A step for an activation apart. False if the partition is none.
  bool activation(const Ops& ops) {
    const auto* applied = appliedTo(ops.front()->inputs()[0].id);
    if (applied == nullptr || applied->ops != ops) {
      return false;
    }
    addActivation(*applied, layouts_.at(applied->from));
    if (const auto pair = inplace_.find(applied->from); pair != inplace_.end()) {
      inplace_.insert_or_assign(applied->to, pair->second);
    }
    return true;
  }

  // One step for a group that is an activation. False if the group is anything else, or its result
  // is to have another layout than its data.
  bool wholeActivation() {
    const auto applied = loneActivation(lowered_, group_outputs_);
    if (!applied || group_inputs_.count(applied->from) == 0) {
      return false;
    }
    const auto from = inputLayout(applied->from);
    const auto wanted = outputLayout(applied->to);
    const auto count = static_cast<size_t>(c10::multiply_integers(from.get_dims()));
    if (from.get_mem_size() != count * sizeof(float) ||
        (wanted.get_layout_type() != LayoutType::any &&
         wanted.get_strides() != from.get_strides())) {
      return false;
    }
    addActivation(*applied, from);
    inplace_.insert_or_assign(applied->to, applied->from);
    return true;
  }

  void addActivation(const ActivationApart& applied, const Layout& from) {
    const auto to = withId(from, applied.to);
    const auto count = static_cast<int64_t>(from.get_mem_size() / sizeof(float));
    Plan::Step step;
    step.inputs.emplace_back(*knownSlot(applied.from), from);
    layouts_.insert_or_assign(applied.to, to);
    step.outputs.emplace_back(resultSlot(applied.to, to), to);
    step.kernel = {[kind = applied.activation, count](auto data, auto result) {
                     activate(kind, static_cast<const float*>(data[0]),
                              static_cast<float*>(result[0]), count);
                   },
                   "eltwise", "llga_activation:avx2"};
    plan_->steps.push_back(std::move(step));
  }

  // A group of Concat, BatchNormInference and maybe ReLU, over channels-last images: one step, by a
  // kernel of our own. False if the group or its data is anything else.
  bool concatAffine() {
    const auto& ops = lowered_.ops;
    const bool relu = ops.size() == 3 && ops[2].kind() == OpKind::ReLU;
    if (!ownKernels() || ops.size() != (relu ? 3 : 2) || ops[0].kind() != OpKind::Concat ||
        ops[1].kind() != OpKind::BatchNormInference ||
        ops[1].inputs()[0].id != ops[0].outputs()[0].id ||
        (relu && ops[2].inputs()[0].id != ops[1].outputs()[0].id)) {
      return false;
    }
    const auto& result = ops.back().outputs()[0];
    const auto strides = channelsLastStrides(*result.sizes);
    if (group_outputs_.size() != 1 || group_outputs_.count(result.id) == 0 || strides.empty() ||
        ops[0].get_attr<int64_t>(Attr::axis) != 1 ||
        (result.dtype != at::kFloat && result.dtype != at::kBFloat16)) {
      return false;
    }
    Plan::Step step;
    ConcatAffine kernel{result.dtype, 1, {}, {}, {}, relu ? 0.F : -HUGE_VALF};
    for (const auto& part : ops[0].inputs()) {
      const auto input = group_inputs_.find(part.id);
      if (input == group_inputs_.end() || part.dtype != result.dtype ||
          request_.input_strides[input->second] != channelsLastStrides(*part.sizes)) {
        return false;
      }
      kernel.channels.push_back((*part.sizes)[1]);
      step.inputs.emplace_back(Slot{Slot::Kind::input, input->second}, inputLayout(part.id));
    }
    const auto outer = outputLayout(result.id);
    if (outer.get_layout_type() != LayoutType::any && outer.get_strides() != strides) {
      return false;
    }
    if (!scaleAndShift(ops[1], kernel)) {
      return false;
    }
    kernel.pixels = c10::multiply_integers(*result.sizes) / (*result.sizes)[1];

    const auto layout = strided(result.id, result.dtype, *result.sizes, strides);
    layouts_.insert_or_assign(result.id, layout);
    step.outputs.emplace_back(resultSlot(result.id, layout), layout);
    step.kernel = {[kernel = std::move(kernel)](auto from, auto to) { kernel.run(from, to[0]); },
                   "concat", "llga_affine"};
    plan_->steps.push_back(std::move(step));
    return true;
  }

  // One step for a group that is a channel shuffle.
  void channelShuffle(const Shuffle& shuffle) {
    Plan::Step step;
    std::vector<int64_t> parts;
    std::vector<int64_t> chunks;
    auto layoutOf = [&](const Value* value, std::vector<int64_t>& channels) {
      const auto facts = request_.facts->tensor(value);
      const auto& sizes = facts.sizes.value();
      channels.push_back(sizes[1]);
      return strided(value->unique(), facts.dtype.value(), sizes, channelsLastStrides(sizes));
    };
    for (const auto* part : shuffle.parts) {
      const auto index = group_inputs_.at(part->unique());
      const auto layout = layoutOf(part, parts);
      if (request_.input_strides[index] != layout.get_strides()) {
        throw CompileError{"a channel shuffle of data that is not channels last"};
      }
      step.inputs.emplace_back(Slot{Slot::Kind::input, index}, layout);
    }
    for (const auto* chunk : shuffle.chunks) {
      const auto index = group_outputs_.at(chunk->unique());
      if (!request_.any_layout[index]) {
        throw CompileError{"a channel shuffle whose result is read outside of groups"};
      }
      const auto layout = layoutOf(chunk, chunks);
      layouts_.insert_or_assign(chunk->unique(), layout);
      step.outputs.emplace_back(Slot{Slot::Kind::output, index}, layout);
    }
    step.kernel = {[kernel = ChannelShuffle(std::move(parts), std::move(chunks), shuffle.groups,
                                            shuffle.pixels, shuffle.item)](auto from, auto to) {
                     kernel.run(from, to);
                   },
                   "shuffle", "llga_shuffle"};
    plan_->steps.push_back(std::move(step));
  }

  // A group that is a squeeze and excitation of channels-last images: one step, by a kernel of our
  // own. False if the group or its data is anything else.
  bool squeezeExcitation() {
    const auto found = excitation(lowered_);
    if (!found || group_outputs_.size() != 1 || group_outputs_.count(found->result.id) == 0 ||
        !knownSlot(found->data.id) || !overChannelsLast(found->data, found->result)) {
      return false;
    }
    Plan::Step step;
    step.inputs.emplace_back(*knownSlot(found->data.id), inputLayout(found->data.id));
    auto bind = [&](const OpSpec& convolution, size_t input) {
      if (input >= convolution.inputs().size()) {
        return size_t{0};  // no bias
      }
      const auto& parameter = convolution.inputs()[input];
      const auto tensor = constantTensor(parameter.id).contiguous();
      step.inputs.emplace_back(keep(tensor), strided(parameter.id, at::kFloat, *parameter.sizes,
                                                     tensor.strides().vec(), /*constant=*/true));
      return step.inputs.size() - 1;
    };
    bind(*found->squeeze, 1);
    bind(*found->excite, 1);
    const auto squeeze_bias = bind(*found->squeeze, 2);
    const auto excite_bias = bind(*found->excite, 2);
    addChannelsLastResult(step, found->result);
    inplace_[found->result.id] = found->data.id;
    overwrites_what_it_reads_ = true;
    step.kernel = {
        [kernel = found->kernel, squeeze_bias, excite_bias](auto from, auto to) {
          auto data = [&](size_t i) { return static_cast<const float*>(from[i]); };
          kernel.run({data(0), data(1), squeeze_bias != 0 ? data(squeeze_bias) : nullptr, data(2),
                      excite_bias != 0 ? data(excite_bias) : nullptr, static_cast<float*>(to[0])});
        },
        "excitation", "llga_excitation"};
    plan_->steps.push_back(std::move(step));
    return true;
  }

  // What the batch norm does to each channel; false if its parameters are no constants.
  bool scaleAndShift(const OpSpec& norm, ConcatAffine& kernel) const {
    std::vector<at::Tensor> parameters;  // weight, bias, mean, variance
    for (size_t i = 1; i <= 4; ++i) {
      const auto id = norm.inputs()[i].id;
      if (!lowered_.operands.at(id).constant) {
        return false;
      }
      parameters.push_back(constantTensor(id).to(at::kFloat));
    }
    auto numbers = [](const at::Tensor& tensor) {
      const auto dense = tensor.contiguous();
      const auto* data = dense.const_data_ptr<float>();
      return std::vector<float>(data, data + dense.numel());
    };
    const auto scale = parameters[0] / (parameters[3] + norm.get_attr<float>(Attr::epsilon)).sqrt();
    kernel.scale = numbers(scale);
    kernel.shift = numbers(parameters[1] - parameters[2] * scale);
    return true;
  }

  // What a kernel does badly in another order of dimensions than its own. An operand that it takes
  // beside its own: oneDNN 3.7 adds it to a matrix product as if it were row-major. The data of a
  // layer norm or of a reduction, and without AVX-512 a factor whose matrices do not lie one behind
  // the other: reference kernels take them, at a hundred times the cost of a copy.
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
             (reads && kind == OpKind::MatMul && usesAvxGemm() && !holdsMatrices(sizes, strides));
    }
    const bool image = !product && strides == channelsLastStrides(sizes);
    return slow || (operand && !image && ops.size() > 1);
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

  // A step that copies such an operand; where the copy will be, and its layout.
  std::pair<Slot, Layout> rowMajor(const Layout& from) {
    const auto id = from.get_id();
    const auto sizes = from.get_dims();
    const auto to = logical_tensor(next_id_++, from.get_data_type(), sizes,
                                   c10::TensorType::contiguousStridesOf(sizes));
    const dnnl::graph::op reorder(next_id_++, OpKind::Reorder, {from}, {to}, "copy");
    const dnnl::graph::partition partition(reorder, dnnl::engine::kind::cpu);
    Plan::Step step;
    step.compiled = partition.compile({from}, {to}, engine());
    step.inputs.push_back(bindInput(step.compiled, from));
    const Slot slot{Slot::Kind::temporary, plan_->temporary_bytes.size()};
    plan_->temporary_bytes.push_back(to.get_mem_size());
    step.outputs.emplace_back(slot, to);
    plan_->steps.push_back(std::move(step));
    return {slot, withId(to, id)};
  }

  // ------------------------------------------------------------------------------------ inputs

  Layout inputLayout(size_t id) const {
    if (const auto it = layouts_.find(id); it != layouts_.end()) {
      return it->second;  // computed by an earlier partition
    }
    const auto& operand = lowered_.operands.at(id);
    const auto& sizes = operand.sizes.value();
    if (const auto it = group_inputs_.find(id); it != group_inputs_.end()) {
      return strided(id, operand.dtype, sizes, request_.input_strides[it->second]);
    }
    if (lowered_.packable.count(id) != 0 && pack_) {
      return any(id, operand.dtype, sizes, /*constant=*/true);
    }
    if (lowered_.constants.count(id) != 0) {
      return strided(id, operand.dtype, sizes, c10::TensorType::contiguousStridesOf(sizes),
                     /*constant=*/true);
    }
    return strided(id, operand.dtype, sizes, constantTensor(id).strides().vec(),
                   /*constant=*/true);
  }

  // Where a value is that is no constant.
  std::optional<Slot> knownSlot(size_t id) const {
    if (const auto it = slots_.find(id); it != slots_.end()) {
      return it->second;
    }
    if (const auto it = group_inputs_.find(id); it != group_inputs_.end()) {
      return Slot{Slot::Kind::input, it->second};
    }
    return std::nullopt;
  }

  std::pair<Slot, Layout> bindInput(const dnnl::graph::compiled_partition& compiled,
                                    const Layout& input) {
    const auto id = input.get_id();
    if (const auto slot = knownSlot(id)) {
      return {*slot, input};
    }
    if (input.get_layout_type() == LayoutType::any) {
      const auto layout = withId(compiled.query_logical_tensor(id), id);
      auto weight = constantTensor(id);
      const auto placement = placementOf(id, layout);
      if (placement == Placement::unaligned || !layout.is_equal(withId(layoutOf(weight), id))) {
        auto packed = packWeight(weight, layout, placement);
        if (const auto releasable = findReleasable(weight)) {
          releasable->packedAs(weight, layout, packed);
        }
        auto* data = packed->data();
        plan_->packed.push_back(std::move(packed));
        return {constantSlot(data), layout};
      }
      return {keep(std::move(weight)), layout};
    }
    return {keep(constantTensor(id)), input};
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
    for (const auto& op : lowered_.ops) {
      const auto& inputs = op.inputs();
      if (op.kind() == OpKind::MatMul && inputs[1].id == id && inputs[0].sizes) {
        const auto rows = c10::multiply_integers(*inputs[0].sizes) / layout.get_dims()[0];
        return rows >= kFewRows && rows < kManyRows ? Placement::unaligned : Placement::aligned;
      }
    }
    return Placement::aligned;
  }

  at::Tensor constantTensor(size_t id) const {
    if (const auto it = lowered_.constants.find(id); it != lowered_.constants.end()) {
      auto made = it->second();
      return lowered_.packable.count(id) != 0 && pack_ ? made : made.contiguous();
    }
    return torch::jit::toIValue(lowered_.values.at(id))->toTensor();
  }

  Slot keep(at::Tensor tensor) {
    if (const auto releasable = findReleasable(tensor)) {
      releasable->pin();
    }
    const auto slot = constantSlot(tensor.data_ptr());
    plan_->constant_tensors.push_back(std::move(tensor));
    return slot;
  }

  Slot constantSlot(void* data) {
    plan_->constants.push_back(data);
    return {Slot::Kind::constant, plan_->constants.size() - 1};
  }

  // ----------------------------------------------------------------------------------- outputs

  Layout outputLayout(size_t id) const {
    const auto& operand = lowered_.operands.at(id);
    const auto it = group_outputs_.find(id);
    if (!operand.sizes) {  // a made-up value between two partitions: oneDNN infers
      return logical_tensor(id, *toDataType(operand.dtype), DNNL_GRAPH_UNKNOWN_NDIMS,
                            LayoutType::any);
    }
    if (const auto* applied = appliedTo(id)) {
      const auto result = outputLayout(applied->to);
      return result.get_layout_type() == LayoutType::any
                 ? any(id, operand.dtype, *operand.sizes, /*constant=*/false)
                 : withId(result, id);
    }
    if (it == group_outputs_.end() || request_.any_layout[it->second]) {
      return any(id, operand.dtype, *operand.sizes, /*constant=*/false);
    }
    const auto facts = request_.facts->tensor(lowered_.values.at(id));
    return strided(id, operand.dtype, *operand.sizes, facts.strides.value());
  }

  Slot resultSlot(size_t id, const Layout& layout) {
    const auto* applied = appliedTo(id);
    const auto it = group_outputs_.find(applied != nullptr ? applied->to : id);
    Slot slot{Slot::Kind::output, 0};
    if (it != group_outputs_.end()) {
      slot.index = it->second;
    } else {
      slot = {Slot::Kind::temporary, plan_->temporary_bytes.size()};
      plan_->temporary_bytes.push_back(layout.get_mem_size());
    }
    slots_.insert_or_assign(id, slot);
    return slot;
  }

  void describeOutput(size_t index) {
    const auto* value = behind(request_.subgraph->outputs()[index]);
    const auto id = value->unique();
    const auto it = layouts_.find(id);
    if (it == layouts_.end() || group_outputs_.at(id) != index) {
      throw CompileError{"an output of the group is not an output of a partition"};
    }
    const auto& layout = it->second;
    const auto facts = request_.facts->tensor(value);
    auto& spec = plan_->outputs[index];
    spec.dtype = *facts.dtype;
    spec.sizes = *facts.sizes;
    spec.strides = request_.any_layout[index] ? layout.get_strides() : *facts.strides;
    if (c10::isQIntType(spec.dtype)) {
      spec.quantizer = makeQuantizer(quantizeParams(value->node()).value());
    }
    spec.call_local = request_.call_local[index];
    spec.inplace_input = spec.call_local ? inplaceInput(id, layout) : -1;
  }

  int64_t inplaceInput(size_t output, const Layout& layout) const {
    const auto pair = inplace_.find(output);
    if (pair == inplace_.end()) {
      return -1;
    }
    const auto it = group_inputs_.find(pair->second);
    if (it == group_inputs_.end() || !request_.owned_inputs[it->second]) {
      return -1;
    }
    const auto& strides = request_.input_strides[it->second];
    const auto* value = request_.subgraph->inputs()[it->second];
    const auto facts = request_.facts->tensor(value);
    const bool same_layout = strides == layout.get_strides() && facts.sizes == layout.get_dims() &&
                             facts.dtype == lowered_.operands.at(output).dtype;
    // A second reader in the group could read after the write; as_target reads no numbers of its
    // target.
    const auto readers =
        std::count_if(value->uses().begin(), value->uses().end(), [](const torch::jit::Use& use) {
          return use.user->kind() != asTargetKind() || use.offset == 0;
        });
    const bool may = readers == 1 || overwrites_what_it_reads_;
    return same_layout && may ? static_cast<int64_t>(it->second) : -1;
  }

  const CompileRequest& request_;
  bool pack_;
  std::shared_ptr<Plan> plan_;
  LoweredGraph lowered_;
  size_t next_id_ = size_t{1} << 32;
  std::unordered_map<size_t, size_t> group_inputs_;
  std::unordered_map<size_t, size_t> group_outputs_;
  std::unordered_map<size_t, Layout> layouts_;  // of values computed so far
  std::unordered_map<size_t, Slot> slots_;      // where they are
  std::unordered_map<size_t, size_t> inplace_;  // output -> input that it may overwrite
  bool overwrites_what_it_reads_ = false;       // the one step of the plan, and when it may
  std::vector<ActivationApart> activations_;
};

}  // namespace

std::shared_ptr<const Plan> compilePlan(const CompileRequest& request) {
  constexpr size_t kMuch = size_t{1} << 20;
  const auto packed = packedBytes();
  std::shared_ptr<const Plan> plan;
  try {
    try {
      plan = PlanCompiler(request, /*pack=*/true).run();
    } catch (const PackError&) {
      plan = PlanCompiler(request, /*pack=*/false).run();
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
