#include "jit/onednn/runtime/temporaries.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace llga {
namespace {

using Port = std::pair<Slot, Layout>;

bool isSame(const Slot& a, const Slot& b) { return a.kind == b.kind && a.index == b.index; }

bool isSameMemory(const Layout& a, const Layout& b) {
  return a.get_data_type() == b.get_data_type() && a.get_dims() == b.get_dims() &&
         a.get_strides() == b.get_strides();
}

bool mentions(const std::vector<Port>& ports, const Slot& slot) {
  return std::any_of(ports.begin(), ports.end(),
                     [&](const Port& port) { return isSame(port.first, slot); });
}

bool mentions(const Plan::Step& step, const Slot& slot) {
  return mentions(step.inputs, slot) || mentions(step.outputs, slot);
}

template <typename Function>
void forEachSlot(Plan::Step& step, const Function& function) {
  for (auto* ports : {&step.inputs, &step.outputs}) {
    for (auto& port : *ports) {
      function(port.first);
    }
  }
}

class Overwriting {
 public:
  Overwriting(Plan& plan, const std::unordered_map<size_t, size_t>& inplace)
      : plan_(plan), inplace_(inplace) {}

  void run() {
    for (size_t i = 0; i < plan_.steps.size(); ++i) {
      for (const auto& output : plan_.steps[i].outputs) {
        const auto to = output.first;
        if (const auto* from = overwritable(i, output)) {
          // An output of the group keeps its memory.
          to.kind == Slot::Kind::output ? replace(*from, to) : replace(to, *from);
        }
      }
    }
  }

 private:
  // The temporary whose memory may become the output's; null if there is none.
  const Slot* overwritable(size_t i, const Port& output) const {
    const auto& [to, layout] = output;
    const auto& steps = plan_.steps;
    const auto& inputs = steps[i].inputs;
    const auto pair = inplace_.find(layout.get_id());
    if (pair == inplace_.end()) {
      return nullptr;
    }
    const auto input = std::find_if(inputs.begin(), inputs.end(), [&](const Port& port) {
      return port.second.get_id() == pair->second;
    });
    if (input == inputs.end() || input->first.kind != Slot::Kind::temporary ||
        !isSameMemory(input->second, layout)) {
      return nullptr;
    }
    const auto& from = input->first;
    const bool read_twice = std::count_if(inputs.begin(), inputs.end(), [&](const Port& port) {
                              return isSame(port.first, from);
                            }) > 1;
    const auto here = steps.begin() + static_cast<std::ptrdiff_t>(i);
    const bool read_later = std::any_of(
        here + 1, steps.end(), [&](const Plan::Step& step) { return mentions(step, from); });
    const bool in_use = std::any_of(steps.begin(), here,
                                    [&](const Plan::Step& step) { return mentions(step, to); });
    return read_twice || read_later || in_use ? nullptr : &from;
  }

  void replace(Slot old, Slot by) {
    for (auto& step : plan_.steps) {
      forEachSlot(step, [&](Slot& slot) { slot = isSame(slot, old) ? by : slot; });
    }
  }

  Plan& plan_;
  const std::unordered_map<size_t, size_t>& inplace_;
};

// From the step that writes it to the last one that reads it.
struct Lifetime {
  size_t temporary;
  size_t first = std::numeric_limits<size_t>::max();
  size_t last = 0;
};

// Of the temporaries that are left, the first ones first.
std::vector<Lifetime> lifetimes(Plan& plan) {
  std::vector<Lifetime> all;
  all.reserve(plan.temporary_bytes.size());
  for (size_t t = 0; t < plan.temporary_bytes.size(); ++t) {
    all.push_back({t});
  }
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    forEachSlot(plan.steps[i], [&](const Slot& slot) {
      if (slot.kind == Slot::Kind::temporary) {
        auto& life = all[slot.index];
        life.first = std::min(life.first, i);
        life.last = i;
      }
    });
  }
  std::erase_if(all, [](const Lifetime& life) { return life.first > life.last; });
  std::stable_sort(all.begin(), all.end(),
                   [](const Lifetime& a, const Lifetime& b) { return a.first < b.first; });
  return all;
}

struct Buffer {
  size_t bytes;
  size_t last;  // step that needs it
};

// The smallest free one that is large enough, else the largest free one; the end if none is free.
std::vector<Buffer>::iterator findFree(std::vector<Buffer>& buffers, size_t step, size_t bytes) {
  auto best = buffers.end();
  for (auto it = buffers.begin(); it != buffers.end(); ++it) {
    if (it->last >= step) {
      continue;
    }
    const bool better = best == buffers.end() ||
                        (best->bytes < bytes ? it->bytes > best->bytes
                                             : it->bytes >= bytes && it->bytes < best->bytes);
    best = better ? it : best;
  }
  return best;
}

void share(Plan& plan) {
  std::vector<Buffer> buffers;
  std::vector<size_t> buffer_of(plan.temporary_bytes.size());
  for (const auto& life : lifetimes(plan)) {
    const auto bytes = plan.temporary_bytes[life.temporary];
    auto buffer = findFree(buffers, life.first, bytes);
    if (buffer == buffers.end()) {
      buffer = buffers.insert(buffer, Buffer{bytes, life.last});
    }
    *buffer = {std::max(buffer->bytes, bytes), life.last};
    buffer_of[life.temporary] = static_cast<size_t>(buffer - buffers.begin());
  }
  for (auto& step : plan.steps) {
    forEachSlot(step, [&](Slot& slot) {
      slot.index = slot.kind == Slot::Kind::temporary ? buffer_of[slot.index] : slot.index;
    });
  }
  plan.temporary_bytes.clear();
  for (const auto& buffer : buffers) {
    plan.temporary_bytes.push_back(buffer.bytes);
  }
}

}  // namespace

void shareTemporaries(Plan& plan, const std::unordered_map<size_t, size_t>& inplace) {
  Overwriting(plan, inplace).run();
  share(plan);
}

}  // namespace llga
