// What kernels apply to a result before they write it.
#pragma once

namespace llga {

enum class Rectifier { none, relu, relu6, hardswish };

}  // namespace llga
