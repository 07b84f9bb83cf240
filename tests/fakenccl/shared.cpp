#include "shared.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace fakenccl {

Shared* Shared::open(const UniqueId& id, int ranks) {
  auto* shared = new Shared;
  const char* folder = getenv("TMPDIR");
  shared->name_ = std::string(folder && *folder ? folder : "/tmp") + "/fakenccl-";
  for (int at = 0; at < 16; at++) {
    char digits[3];
    snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(id.bytes[at]));
    shared->name_ += digits;
  }
  const size_t cards = (sizeof(Card) * ranks + 4095) / 4096 * 4096;
  shared->bytes_ = cards + sizeof(Channel) * ranks * ranks;
  const int file = ::open(shared->name_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* base = MAP_FAILED;
  // A file that is as long already keeps what is in it.
  if (file >= 0 && !ftruncate(file, static_cast<off_t>(shared->bytes_))) {
    base = mmap(nullptr, shared->bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (file >= 0) close(file);
  if (base == MAP_FAILED) {
    delete shared;
    return nullptr;
  }
  shared->base_ = base;
  shared->ranks_ = ranks;
  shared->cards_ = static_cast<Card*>(base);
  shared->channels_ = reinterpret_cast<Channel*>(static_cast<char*>(base) + cards);
  return shared;
}

Shared::~Shared() {
  if (base_) munmap(base_, bytes_);
}

void Shared::hide() const { unlink(name_.c_str()); }

}  // namespace fakenccl
