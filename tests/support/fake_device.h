// A device that keeps work until somebody synchronises, as a real one may; it can refuse
// registrations.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device.h"
#include "protocol/error.h"

namespace forebay::testing {

class FakeDevice final : public gpu::Device {
 public:
  std::string_view name() const override { return "fake"; }

  absl::StatusOr<std::unique_ptr<gpu::Stream>> MakeStream() override {
    return std::make_unique<FakeStream>();
  }

  absl::StatusOr<std::unique_ptr<gpu::HostRegistration>> Register(std::span<const std::byte> bytes,
                                                                  gpu::HostAccess access) override {
    if (refuse_registrations) {
      return protocol::MakeError(protocol::ErrorId::kUnsupported, "the device refuses this memory");
    }
    registrations.push_back({bytes.data(), access});
    return std::make_unique<FakeRegistration>(live_registrations);
  }

  struct Registration {
    const std::byte* begin;
    gpu::HostAccess access;
  };
  bool refuse_registrations = false;
  std::vector<Registration> registrations;
  std::shared_ptr<int> live_registrations = std::make_shared<int>(0);

 private:
  class FakeRegistration final : public gpu::HostRegistration {
   public:
    explicit FakeRegistration(std::shared_ptr<int> live) : live_(std::move(live)) { ++*live_; }
    ~FakeRegistration() override { --*live_; }

   private:
    std::shared_ptr<int> live_;
  };

  class FakeEvent final : public gpu::Event {
   public:
    bool Done() const override { return *done_; }
    std::shared_ptr<bool> done() const { return done_; }

   private:
    std::shared_ptr<bool> done_ = std::make_shared<bool>(false);
  };

  class FakeStream final : public gpu::Stream {
   public:
    ~FakeStream() override { RunAll(); }

    absl::Status Copy(std::span<std::byte> to, std::span<const std::byte> from) override {
      work_.push_back([to, from] {
        if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
      });
      return absl::OkStatus();
    }

    absl::StatusOr<std::unique_ptr<gpu::Event>> Record() override {
      auto event = std::make_unique<FakeEvent>();
      work_.push_back([done = event->done()] { *done = true; });
      return event;
    }

    absl::Status WaitFor(const gpu::Event& /*event*/) override { return absl::OkStatus(); }

    absl::Status Synchronize() override {
      RunAll();
      return absl::OkStatus();
    }

   private:
    void RunAll() {
      for (const auto& work : std::exchange(work_, {})) work();
    }

    std::vector<std::function<void()>> work_;
  };
};

}  // namespace forebay::testing
