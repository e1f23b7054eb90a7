// The fuser as the rest of the process sees it: the ordered list of passes, the switch, and the
// registration of the operator.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "jit/onednn/ir.h"

namespace llga {

struct PassEntry {
  const char* name;
  void (*run)(const std::shared_ptr<Graph>& graph);
  const char* reason;  // why it stands where it stands
  // Whether the pipeline needs it on this processor; null: on any.
  bool (*isNeeded)() = nullptr;
};

// The pipeline, in order.
const std::vector<PassEntry>& passes();

// Throws std::invalid_argument, naming the known ones, for an unknown pass.
void setPassEnabled(const std::string& name, bool enabled);
bool isPassEnabled(const std::string& name);
void runPass(const std::string& name, const std::shared_ptr<Graph>& graph);

// All enabled passes. If one throws, the graph is left as it was.
void runPipeline(std::shared_ptr<Graph>& graph);

// Puts the pipeline into TorchScript's executor, for the whole process, or takes it out. Graphs
// that are optimised already stay as they are. Returns what it was. Any thread.
bool setEnabled(bool enabled);
bool isEnabled();

}  // namespace llga
