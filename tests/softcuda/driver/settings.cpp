#include "settings.h"

#include <cstdlib>
#include <random>
#include <sstream>

#include "log.h"

namespace softcuda {

namespace {

std::string text(const char* name, const char* otherwise = "") {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

uint64_t number(const char* name, uint64_t otherwise) {
  const std::string value = text(name);
  if (value.empty()) return otherwise;
  char* end = nullptr;
  const uint64_t parsed = strtoull(value.c_str(), &end, 10);
  if (!*end) return parsed;
  say("%s=%s is not a number", name, value.c_str());
  abort();
}

// The device that an entry of CUDA_VISIBLE_DEVICES names, by its number or the end of its UUID; -1: none.
int named(const std::string& entry, int devices) {
  const bool is_uuid = entry.rfind("GPU-", 0) == 0 && entry.size() > 6;
  const std::string digits = is_uuid ? entry.substr(entry.size() - 2) : entry;
  char* end = nullptr;
  const long device = strtol(digits.c_str(), &end, is_uuid ? 16 : 10);
  return !*end && device >= 0 && device < devices ? static_cast<int>(device) : -1;
}

std::vector<int> visible(int devices) {
  std::vector<int> seen;
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) {
    for (int device = 0; device < devices; ++device) seen.push_back(device);
    return seen;
  }
  // The first entry that names none ends the list.
  for (const std::string& entry : split(list, ',')) {
    const int device = named(entry, devices);
    if (device < 0) break;
    seen.push_back(device);
  }
  return seen;
}

std::map<int, int> attributes(const std::string& list) {
  std::map<int, int> found;
  for (const std::string& pair : split(list, ',')) {
    const auto sides = split(pair, '=');
    if (sides.size() == 2) found[atoi(sides[0].c_str())] = atoi(sides[1].c_str());
  }
  return found;
}

Settings read() {
  Settings settings{};
  settings.devices = static_cast<int>(number("SOFTCUDA_DEVICES", 2));
  settings.visible = visible(settings.devices);
  settings.memory = number("SOFTCUDA_MEMORY_MB", 4096) << 20;
  settings.queues = static_cast<unsigned>(number("SOFTCUDA_QUEUES", 0));
  settings.delay_us = static_cast<unsigned>(number("SOFTCUDA_DELAY_US", 0));
  settings.gap_us = static_cast<unsigned>(number("SOFTCUDA_GAP_US", 0));
  settings.warn_after_ms = static_cast<unsigned>(number("SOFTCUDA_WARN_AFTER_MS", 20000));
  settings.seed = number("SOFTCUDA_SEED", 0);
  settings.weak = number("SOFTCUDA_WEAK", 0);
  settings.poison = number("SOFTCUDA_POISON", 1);
  settings.leaks = number("SOFTCUDA_LEAKS", 0);
  settings.log = number("SOFTCUDA_LOG", 0);
  settings.host_pointers_differ = number("SOFTCUDA_HOST_POINTERS_DIFFER", 0);
  settings.peers = number("SOFTCUDA_PEERS", 1);
  settings.blocking = text("SOFTCUDA_BLOCKING") == "all" ? Blocking::All : Blocking::Usual;
  settings.driver_version = static_cast<int>(number("SOFTCUDA_DRIVER_VERSION", 13020));
  settings.fault = text("SOFTCUDA_FAULT");
  settings.fall_off = text("SOFTCUDA_FALL_OFF");
  settings.twins = text("SOFTCUDA_TWINS");
  settings.forbidden_threads = split(text("SOFTCUDA_FORBIDDEN_THREADS"), ',');
  settings.attributes = attributes(text("SOFTCUDA_ATTRIBUTES"));
  if (settings.delay_us || settings.gap_us) {
    if (!settings.seed) settings.seed = std::random_device()();
    say("delays up to %u us, gaps up to %u us, SOFTCUDA_SEED=%lu", settings.delay_us, settings.gap_us, settings.seed);
  }
  return settings;
}

}  // namespace

const Settings& settings() {
  static const Settings* const settings = new Settings(read());
  return *settings;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> pieces;
  std::istringstream stream(text);
  for (std::string piece; std::getline(stream, piece, at);) {
    if (!piece.empty()) pieces.push_back(piece);
  }
  return pieces;
}

}  // namespace softcuda
