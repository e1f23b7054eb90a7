// The kernel of a node with a subgraph. Nodes that share a Subgraph (copies of a graph) share it.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "jit/onednn/ir.h"

namespace llga {

// Makes a Kernel(node) where there is none. Any thread may call.
template <typename Kernel>
std::shared_ptr<Kernel> sharedKernel(const Node* node) {
  static auto* mutex = new std::mutex;
  static auto* kernels = new std::unordered_map<const Graph*, std::weak_ptr<Kernel>>;
  const std::lock_guard lock(*mutex);
  // A live kernel keeps its subgraph alive, so an address can't stand for two subgraphs.
  const auto* key = node->g(torch::jit::attr::Subgraph).get();
  if (auto known = (*kernels)[key].lock()) {
    return known;
  }
  for (auto it = kernels->begin(); it != kernels->end();) {
    it = it->second.expired() && it->first != key ? kernels->erase(it) : std::next(it);
  }
  auto kernel = std::make_shared<Kernel>(node);
  (*kernels)[key] = kernel;
  return kernel;
}

}  // namespace llga
