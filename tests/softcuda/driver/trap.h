// A handler of SIGSEGV that says so if the host touched device memory, then lets the handler before it act.
#pragma once

namespace softcuda {

void install_trap();

}  // namespace softcuda
