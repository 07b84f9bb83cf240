// What the environment says. The table in the README is the manual.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace softcuda {

// Which calls wait for all work of the device.
enum class Blocking {
  Usual,  // those known for it: free, unregister, close a handle, load or unload a module
  All,    // those too that drivers may do it in: allocate and register memory
};

struct Settings {
  int devices;               // of the machine
  std::vector<int> visible;  // those that the process sees, in its order
  uint64_t memory;  // of a device, in bytes
  unsigned queues;  // that all streams of the process share; 0: each stream has its own
  unsigned delay_us;
  unsigned gap_us;
  unsigned warn_after_ms;
  uint64_t seed;
  bool weak;
  bool poison;
  bool leaks;
  bool log;
  bool host_pointers_differ;
  bool peers;
  Blocking blocking;
  int driver_version;
  std::string fault;
  std::string fall_off;
  std::string twins;
  std::vector<std::string> forbidden_threads;
  std::map<int, int> attributes;
};

// Read once, when the first call comes.
const Settings& settings();

// Splits at a character; no pieces from an empty text.
std::vector<std::string> split(const std::string& text, char at);

}  // namespace softcuda
