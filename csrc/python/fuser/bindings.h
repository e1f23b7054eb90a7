// The parts of the extension module llga_fuser._C, one function a source file.
#pragma once

#include <pybind11/pybind11.h>

void bindAheadOfTime(pybind11::module_& m);
void bindReport(pybind11::module_& m);
