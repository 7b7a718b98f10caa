// SPDX-License-Identifier: Apache-2.0
// An allocator for std::allocate_shared whose pool lives as long as what came from it.
#pragma once

#include <cstddef>
#include <memory>
#include <memory_resource>
#include <utility>

namespace forebay::client::internal {

// Threads  As the pool.
template <typename T>
class PoolAllocator {
 public:
  using value_type = T;

  explicit PoolAllocator(std::shared_ptr<std::pmr::memory_resource> pool)
      : pool_(std::move(pool)) {}
  template <typename Other>
  PoolAllocator(const PoolAllocator<Other>& other) : pool_(other.pool()) {}

  T* allocate(size_t count) {
    return static_cast<T*>(pool_->allocate(count * sizeof(T), alignof(T)));
  }
  void deallocate(T* at, size_t count) { pool_->deallocate(at, count * sizeof(T), alignof(T)); }

  const std::shared_ptr<std::pmr::memory_resource>& pool() const { return pool_; }
  template <typename Other>
  bool operator==(const PoolAllocator<Other>& other) const {
    return pool_ == other.pool();
  }

 private:
  std::shared_ptr<std::pmr::memory_resource> pool_;
};

}  // namespace forebay::client::internal
