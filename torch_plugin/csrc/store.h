// A c10d::Store for the engine. Rank 0 writes a value, and others read one; a leader of a large world writes one and reads one or two.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstring>
#include <string>

#include "errors.h"
#include "ncclx_abi.h"

namespace ncclx {

inline void describe(NcclxError* error, const char* text) {
  std::strncpy(error->text, text, sizeof(error->text) - 1);
  error->text[sizeof(error->text) - 1] = '\0';
}

class StoreAdapter {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)), host_(host(store_)) {}

  NcclxStore view() { return {this, &StoreAdapter::set, &StoreAdapter::get, host_.empty() ? nullptr : host_.c_str()}; }

  // Deletes the written key once every rank has read it, so that the store can serve another communicator.
  void forget() noexcept {
    try {
      if (!written_.empty()) store_->deleteKey(written_);
    } catch (...) {
      // Stores that cannot delete keep the key, which harms only a second communicator on the same prefix.
    }
  }

 private:
  static int32_t set(void* context, const char* key, const uint8_t* value, uint64_t len, NcclxError* error) {
    auto* self = static_cast<StoreAdapter*>(context);
    return guarded(error, [&] {
      self->store_->set(key, std::vector<uint8_t>(value, value + len));
      self->written_ = key;
    });
  }

  static int32_t get(void* context, const char* key, int64_t timeout_ms, void (*write)(void*, const uint8_t*, uint64_t),
                     void* sink, NcclxError* error) {
    auto* self = static_cast<StoreAdapter*>(context);
    return guarded(error, [&] {
      self->store_->wait({key}, std::chrono::milliseconds(timeout_ms));
      const std::vector<uint8_t> value = self->store_->get(key);
      write(sink, value.data(), value.size());
    });
  }

  template <typename F>
  static int32_t guarded(NcclxError* error, F&& f) noexcept {
    try {
      f();
      return NCCLX_OK;
    } catch (const std::exception& exception) {
      describe(error, text_of(exception));
    } catch (...) {
      describe(error, "an exception of unknown type");
    }
    return NCCLX_NETWORK;
  }

  static std::string host(c10::intrusive_ptr<c10d::Store> store) {
    // c10::dynamic_intrusive_pointer_cast leaks a pointer that it cannot cast.
    while (auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get())) {
      store = prefix->getUnderlyingStore();
    }
    auto* tcp = dynamic_cast<c10d::TCPStore*>(store.get());
    return tcp ? tcp->getHost() : std::string();
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string host_;
  std::string written_;
};

}  // namespace ncclx
