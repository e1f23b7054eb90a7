// The parts of the extension module llga_fuser._C, one function a source file.
#pragma once

#include <pybind11/pybind11.h>

void bindReport(pybind11::module_& m);
