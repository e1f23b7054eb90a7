// Steps that resize images, or pad them.
//
// As steps/step_maker.h says. False: nothing is added, as the kernel does not take that.
#pragma once

#include <utility>

#include "jit/onednn/runtime/own_padding.h"
#include "jit/onednn/runtime/own_resampling.h"
#include "jit/onednn/runtime/steps/step_maker.h"

namespace llga {

class ResamplingSteps : public StepMaker {
 public:
  using StepMaker::StepMaker;

  // One step for a group that resizes images, behind another one if these lie in an order that the
  // kernel does not take.
  void resampling(FoundResampling found);

  // Likewise for one that pads them.
  void padding(const FoundPadding& found);

  // A step that resizes images, the result of which lies in planes, or that have one channel:
  // oneDNN has no such kernel, or a slow one. False for any other partition.
  bool resampling(const Ops& ops);

 private:
  // In which order images lie, and in which the result will.
  struct Orders {
    std::pair<Slot, Layout> data;
    bool last;     // the data: channels last
    bool by_rows;  // dimension by dimension
    bool to_last;  // the result: channels last, else dimension by dimension
  };

  // Throws CompileError where the result has to lie in another one.
  Orders ordersOf(const Value* data, const Value* result);

  // The data, or a copy: channels last where the result is, else in either order.
  std::pair<Slot, Layout> dataFor(const Orders& orders, const Value* data);

  void addResult(Plan::Step& step, const Orders& orders, const Value* result);

  void addResampling(Plan::Step step, Resampling kernel, Resampling::Order from,
                     Resampling::Order to);
};

}  // namespace llga
