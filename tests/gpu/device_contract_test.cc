// Goal    Every device keeps the contract of gpu/device.h, so that what stands above it can be
//         tested on any.
// Method  One set of cases, run on the host and on the fake, which does nothing before it must.

#include <array>
#include <functional>
#include <memory>
#include <string>

#include "gpu/device.h"
#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "tests/support/fake_device.h"
#include "tests/support/pattern.h"
#include "tests/support/status_test.h"

namespace forebay::gpu {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::Pattern;

struct DeviceCase {
  std::string name;
  std::function<std::unique_ptr<Device>()> make;
};

class DeviceContract : public ::testing::TestWithParam<DeviceCase> {
 protected:
  std::unique_ptr<Device> device_ = GetParam().make();
};

TEST_P(DeviceContract, CopiesAreThereAfterSynchronize) {
  for (const size_t size : std::array<size_t, 4>{0, 1, 63, 4097}) {
    const Bytes from = Pattern(size, 1);
    Bytes to(size);
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> stream, device_->MakeStream());
    ASSERT_OK(stream->Copy(to, from));
    ASSERT_OK(stream->Synchronize());
    EXPECT_EQ(to, from) << size << " bytes";
  }
}

TEST_P(DeviceContract, WorkOfOneStreamRunsInOrder) {
  const Bytes first = Pattern(1000, 1);
  const Bytes second = Pattern(1000, 2);
  Bytes middle(1000);
  Bytes end(1000);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> stream, device_->MakeStream());
  ASSERT_OK(stream->Copy(middle, first));
  ASSERT_OK(stream->Copy(end, middle));
  ASSERT_OK(stream->Copy(middle, second));
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(end, first);
  EXPECT_EQ(middle, second);
}

TEST_P(DeviceContract, AnEventIsDoneOnceTheWorkBeforeItIs) {
  const Bytes from = Pattern(100, 1);
  Bytes to(100);
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Stream> stream, device_->MakeStream());
  ASSERT_OK(stream->Copy(to, from));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Event> event, stream->Record());
  if (event->Done()) {
    EXPECT_EQ(to, from);
  }
  ASSERT_OK(stream->Synchronize());
  EXPECT_TRUE(event->Done());
  ASSERT_OK(stream->WaitFor(*event));
  stream.reset();
  EXPECT_TRUE(event->Done());
}

TEST_P(DeviceContract, AStreamEndsItsWorkBeforeItDies) {
  const Bytes from = Pattern(100, 1);
  Bytes to(100);
  {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> stream, device_->MakeStream());
    ASSERT_OK(stream->Copy(to, from));
  }
  EXPECT_EQ(to, from);
}

TEST_P(DeviceContract, MemoryOfBothKindsCanBeRegistered) {
  const Bytes bytes = Pattern(4096, 1);
  EXPECT_OK(device_->Register(bytes, HostAccess::kRead));
  EXPECT_OK(device_->Register(bytes, HostAccess::kReadWrite));
}

INSTANTIATE_TEST_SUITE_P(
    Devices, DeviceContract,
    ::testing::Values(DeviceCase{"Host", [] { return std::make_unique<HostDevice>(); }},
                      DeviceCase{"Fake", [] { return std::make_unique<testing::FakeDevice>(); }}),
    [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace forebay::gpu
