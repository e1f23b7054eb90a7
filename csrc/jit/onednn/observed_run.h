// Runs of a graph that show each of its values: types before the first call, facts for a plan.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <vector>

#include "jit/onednn/ir.h"

namespace llga {

// A copy of a graph that calls back with every value it computes and with its inputs:
//
//   %2 : Tensor = aten::relu(%1)     ->     %2 : Tensor = aten::relu(%1)
//                                            = llga::observe[llga_first=7](%2)
//
// Values live no longer than in the graph itself. Owned, and run, by one thread.
class ObservedGraph {
 public:
  // With the value as `graph` has it, which must outlive the runs. Constants are not shown.
  using See = std::function<void(Value*, const c10::IValue&)>;

  ObservedGraph(Graph& graph, See see);

  // Raises what the graph raises.
  void run(torch::jit::Stack inputs) const;

 private:
  struct Watch final : torch::CustomClassHolder {  // as nodes of the copy hold it
    See see;
    std::vector<Value*> originals;  // by number
  };

  void visit(Block* original, Block* copy);
  void observe(at::ArrayRef<Value*> originals, at::ArrayRef<Value*> copies, Node* before);

  std::shared_ptr<Graph> graph_;
  c10::intrusive_ptr<Watch> watch_;
};

}  // namespace llga
