// Switches in the environment. Callers keep the answer: it does not change while a process runs.
#pragma once

#include <cstdlib>
#include <string_view>

namespace llga {

// Whether the environment holds `variable` with this value.
inline bool holds(const char* variable, std::string_view value) {
  const char* text = std::getenv(variable);
  return text != nullptr && text == value;
}

inline bool switchedOff(const char* variable) { return holds(variable, "off"); }
inline bool switchedOn(const char* variable) { return holds(variable, "on"); }

}  // namespace llga
