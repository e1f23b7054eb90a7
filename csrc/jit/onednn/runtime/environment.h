// Switches in the environment. Callers keep the answer: it does not change while a process runs.
#pragma once

#include <cstdlib>
#include <string_view>

namespace llga {

// Whether the environment holds `variable` with the value "off".
inline bool switchedOff(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && std::string_view(text) == "off";
}

}  // namespace llga
