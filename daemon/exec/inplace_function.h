// SPDX-License-Identifier: Apache-2.0
// A callable that stores its captures in itself: making, moving and calling one allocates no heap memory.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace forebay::daemon {

template <typename Signature, size_t kBytes>
class InplaceFunction;

// Move-only callable like absl::AnyInvocable. Stores captures of up to `kBytes` bytes. Larger captures do not compile.
//
// Threads  Calls may run at once where the callable's own may.
template <typename Result, typename... Args, size_t kBytes>
class InplaceFunction<Result(Args...), kBytes> {
 public:
  InplaceFunction() = default;
  InplaceFunction(std::nullptr_t) {}

  template <typename Callable, typename = std::enable_if_t<
                                   !std::is_same_v<std::remove_cvref_t<Callable>, InplaceFunction>>>
  InplaceFunction(Callable&& callable) {  // implicit conversion, as for std::function
    using Stored = std::decay_t<Callable>;
    static_assert(sizeof(Stored) <= kBytes, "its captures have no room");
    static_assert(alignof(Stored) <= alignof(std::max_align_t));
    std::construct_at(reinterpret_cast<Stored*>(bytes_), std::forward<Callable>(callable));
    call_ = [](std::byte* bytes, Args... args) -> Result {
      return (*Of<Stored>(bytes))(std::forward<Args>(args)...);
    };
    move_ = [](std::byte* from, std::byte* to) {
      if (to != nullptr)
        std::construct_at(reinterpret_cast<Stored*>(to), std::move(*Of<Stored>(from)));
      std::destroy_at(Of<Stored>(from));
    };
  }

  InplaceFunction(InplaceFunction&& other) noexcept { MoveFrom(other); }
  InplaceFunction& operator=(InplaceFunction&& other) noexcept {
    if (this == &other) return *this;
    Reset();
    MoveFrom(other);
    return *this;
  }
  ~InplaceFunction() { Reset(); }

  Result operator()(Args... args) { return call_(bytes_, std::forward<Args>(args)...); }
  bool operator==(std::nullptr_t) const { return call_ == nullptr; }

 private:
  template <typename Stored>
  static Stored* Of(std::byte* bytes) {
    return std::launder(reinterpret_cast<Stored*>(bytes));
  }
  void Reset() {
    if (call_ == nullptr) return;
    move_(bytes_, nullptr);
    call_ = nullptr;
  }
  void MoveFrom(InplaceFunction& other) {
    if (other.call_ == nullptr) return;
    other.move_(other.bytes_, bytes_);
    move_ = other.move_;
    call_ = std::exchange(other.call_, nullptr);
  }

  Result (*call_)(std::byte* bytes, Args... args) = nullptr;  // null: empty
  // Moves the callable; destroys it if `to` is null.
  void (*move_)(std::byte* from, std::byte* to) = nullptr;
  alignas(std::max_align_t) std::byte bytes_[kBytes];
};

}  // namespace forebay::daemon
