// SPDX-License-Identifier: Apache-2.0
// forebay._core: the client for Python. Mapped memory crosses as DLPack views that keep the mapping alive; extra_state and
// exchanges cross as bytes, tensors on a device by address.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/activation_store.h"
#include "client/client.h"
#include "client/environment.h"
#include "client/python/src/admin.h"
#include "client/python/src/attach_options.h"
#include "client/python/src/ended_objects.h"
#include "client/python/src/errors.h"
#include "client/python/src/timeout.h"
#include "client/window_registry.h"
#include "gpu/device.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"

namespace forebay::python {
namespace nb = nanobind;
namespace {

using client::Attachment;
using protocol::DType;
using protocol::ErrorId;
using protocol::MakeError;

// Array for `torch.from_dlpack` and `numpy.from_dlpack`. It is not marked read-only, because torch would warn. The pages of the
// weights are read-only: at a write, the handler of SIGSEGV makes them this process's own between steps (WrittenPages), and prints
// an explanation otherwise.
using View = nb::ndarray<nb::array_api>;
using Buffer = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

// Partition, first element, offset in bytes from where copy_weights() is to copy to, bytes.
using CopyTuple = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t>;
using HyperDict = std::map<std::string, double>;

nb::dlpack::dtype DlpackType(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  switch (dtype) {
    case DType::kFloat32:
      return {static_cast<uint8_t>(Code::Float), 32, 1};
    case DType::kFloat16:
      return {static_cast<uint8_t>(Code::Float), 16, 1};
    case DType::kBFloat16:
      return {static_cast<uint8_t>(Code::Bfloat), 16, 1};
    case DType::kInt16:
      return {static_cast<uint8_t>(Code::Int), 16, 1};
    case DType::kInt8:
      return {static_cast<uint8_t>(Code::Int), 8, 1};
    case DType::kUInt8:
      return {static_cast<uint8_t>(Code::UInt), 8, 1};
  }
  return {};
}

View MakeView(std::span<const std::byte> bytes, DType dtype, std::shared_ptr<const void> owner) {
  auto kept = std::make_unique<std::shared_ptr<const void>>(std::move(owner));
  const nb::capsule capsule(kept.get(), [](void* held) noexcept {
    const std::unique_ptr<std::shared_ptr<const void>> owned(
        static_cast<std::shared_ptr<const void>*>(held));
  });
  kept.release();  // the capsule owns it
  const size_t elems = bytes.size() / SizeBytes(dtype);
  return View(const_cast<std::byte*>(bytes.data()), 1, &elems, capsule, nullptr, DlpackType(dtype),
              nb::device::cpu::value);
}

std::span<const std::byte> BytesOf(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

// True where a signal handler of Python's has raised; the exception stays set for Raise(). Python runs
// handlers on the main thread alone. No other thread takes the GIL here: an interpreter that is ending
// would end it in the middle of our frames.
bool PythonInterrupted() {
  if (::gettid() != ::getpid()) return false;
  const nb::gil_scoped_acquire acquired;
  return PyErr_CheckSignals() != 0;
}

class PyAttachment {
 public:
  PyAttachment(std::unique_ptr<Attachment> attachment, std::shared_ptr<gpu::Device> device,
               std::shared_ptr<EndedObjects> ended)
      : device_(std::move(device)), ended_(std::move(ended)), attachment_(std::move(attachment)) {}
  PyAttachment(PyAttachment&&) = default;
  PyAttachment& operator=(PyAttachment&&) = default;
  PyAttachment(const PyAttachment&) = delete;
  PyAttachment& operator=(const PyAttachment&) = delete;
  ~PyAttachment() {
    attachment_.reset();
    if (ended_ != nullptr) ended_->GiveUp();
  }

  Attachment& operator*() { return *attachment_; }
  Attachment* operator->() { return attachment_.get(); }

  const std::shared_ptr<gpu::Device>& device() const { return device_; }
  DType dtype() const { return attachment_->layout().spec().dtype; }
  // A stream of torch's, by its handle; of the processor, where copies end at once, it is ignored.
  std::unique_ptr<gpu::Stream> StreamOf(uintptr_t handle) {
    return ValueOrThrow(device_->BorrowStream(handle));
  }
  std::shared_ptr<const void> Keep(nb::object object) {
    ended_->GiveUp();
    return EndedObjects::Keep(ended_, std::move(object));
  }
  void GiveUpEnded() { ended_->GiveUp(); }

  std::set<uint64_t> leases;  // granted by fetch() and not released

 private:
  std::shared_ptr<gpu::Device> device_;
  std::shared_ptr<EndedObjects> ended_;
  std::unique_ptr<Attachment> attachment_;
};

// Tensors by address; a stream is torch's, by its handle.
class PyActivationStore {
 public:
  explicit PyActivationStore(PyAttachment& attachment)
      : device_(attachment.device()),
        store_(ValueOrThrow(client::ActivationStore::Create(*attachment, device_))) {}

  client::ActivationStore* operator->() { return store_.get(); }
  std::unique_ptr<gpu::Stream> StreamOf(uintptr_t handle) {
    return ValueOrThrow(device_->BorrowStream(handle));
  }

  std::optional<uint64_t> Save(uintptr_t address, uint64_t size_bytes, uintptr_t stream) {
    const std::unique_ptr<gpu::Stream> compute = StreamOf(stream);
    const std::span bytes(reinterpret_cast<const std::byte*>(address), size_bytes);
    return ValueOrThrow(WithoutGil([&] { return store_->Save(bytes, *compute); }));
  }
  void Load(uint64_t number, uintptr_t address, uint64_t size_bytes, uintptr_t stream) {
    const std::unique_ptr<gpu::Stream> compute = StreamOf(stream);
    const std::span bytes(reinterpret_cast<std::byte*>(address), size_bytes);
    Check(WithoutGil([&] { return store_->Load(number, bytes, *compute); }));
  }

 private:
  std::shared_ptr<gpu::Device> device_;
  std::unique_ptr<client::ActivationStore> store_;
};

// Seconds that an attach waits for a daemon.
double FirstDaemonWait(std::optional<double> daemon_wait) {
  const auto request =
      daemon_wait.has_value() ? std::optional(TimeoutOf(*daemon_wait)) : std::nullopt;
  return std::chrono::duration<double>(ValueOrThrow(client::FirstDaemonWait(request))).count();
}

PyAttachment Attach(const nb::dict& mapping) {
  auto ended = std::make_shared<EndedObjects>();
  client::AttachOptions options = AttachOptionsFrom(mapping, ended);
  options.interrupt_check = PythonInterrupted;
  client::InstallSegvHandler();
  std::shared_ptr<gpu::Device> device = options.device;
  return {ValueOrThrow(WithoutGil([&] { return Attachment::Attach(std::move(options)); })),
          std::move(device), std::move(ended)};
}

nb::list Groups(PyAttachment& self) {
  nb::list groups;
  for (const protocol::GroupPlace& group : self->layout().groups()) {
    groups.append(nb::make_tuple(group.weights_offset_bytes, group.elems));
  }
  return groups;
}

// (partition, parameter, first element in the partition), in the order of the layout.
nb::list Boxes(PyAttachment& self) {
  nb::list boxes;
  for (const protocol::BoxPlace& place : self->layout().boxes()) {
    boxes.append(nb::make_tuple(place.partition, place.box.param, place.partition_elem));
  }
  return boxes;
}

nb::list ParamOffsets(PyAttachment& self) {
  nb::list offsets;
  for (const protocol::ParamPlace& param : self->layout().params()) {
    offsets.append(param.offset_elems);
  }
  return offsets;
}

nb::list States(PyAttachment& self) {
  nb::list states;
  for (const std::string& name : protocol::StateNames(self->layout().spec().optimizer)) {
    states.append(name);
  }
  return states;
}

nb::list TraceGroups(PyAttachment& self) {
  nb::list groups;
  for (const uint32_t group : self->trace()) groups.append(group);
  return groups;
}

View Weights(PyAttachment& self, uint32_t group) {
  Check(self->CheckPartition(group));
  return MakeView(self->weights(group), self.dtype(), self->weights_owner());
}

View Window(PyAttachment& self) {
  return MakeView(self->weights(), DType::kUInt8, self->weights_owner());
}

View DaemonWindow(PyAttachment& self) {
  const std::shared_ptr<const std::byte> bytes = ValueOrThrow(self->DaemonWeights());
  return MakeView({bytes.get(), self->weights().size()}, DType::kUInt8, bytes);
}

std::vector<std::tuple<uint64_t, uint64_t>> WrittenWeights(PyAttachment& self) {
  std::vector<std::tuple<uint64_t, uint64_t>> ranges;
  for (const auto& [begin, end] : self->WrittenWeights()) ranges.emplace_back(begin, end);
  return ranges;
}

std::vector<uint64_t> Locate(PyAttachment& self, const std::vector<uint32_t>& partitions,
                             double timeout) {
  const std::byte* const begin = self->weights().data();
  std::vector<uint64_t> offsets;
  for (const auto& bytes :
       ValueOrThrow(WithoutGil([&] { return self->Locate(partitions, TimeoutOf(timeout)); }))) {
    offsets.push_back(static_cast<uint64_t>(bytes.data() - begin));
  }
  return offsets;
}

void LocateAhead(PyAttachment& self, const std::vector<uint32_t>& partitions, double timeout) {
  Check(WithoutGil([&] { return self->LocateAhead(partitions, TimeoutOf(timeout)); }));
}

View GradSlot(PyAttachment& self, uint32_t group, double timeout, bool zero) {
  const client::GradFill fill = zero ? client::GradFill::kZero : client::GradFill::kNone;
  const std::span<std::byte> bytes =
      ValueOrThrow(WithoutGil([&] { return self->GradSlot(group, fill, TimeoutOf(timeout)); }));
  std::shared_ptr<const void> owner = self->grad_owner(group);
  if (owner == nullptr) {
    Raise(MakeError(ErrorId::kNotReady,
                    absl::StrCat("group ", group, "'s slot was delivered by another thread")));
  }
  return MakeView(bytes, self.dtype(), std::move(owner));
}

void AddGradient(PyAttachment& self, uint32_t param, const Buffer& gradient, double timeout) {
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(gradient.data()),
                                         gradient.nbytes());
  Check(WithoutGil([&] { return self->AddGradient(param, bytes, TimeoutOf(timeout)); }));
}

// `address` is of `size_bytes` of the device's, which work of `stream` so far fills; `keep` lives until they
// were copied.
void AddDeviceGradient(PyAttachment& self, uint32_t param, uintptr_t address, uint64_t size_bytes,
                       uintptr_t stream, nb::object keep, double timeout) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(address), size_bytes);
  std::shared_ptr<const void> kept = self.Keep(std::move(keep));
  const std::unique_ptr<gpu::Stream> ready = self.StreamOf(stream);
  Check(WithoutGil([&] {
    return self->AddGradient(param, bytes, *ready, std::move(kept), TimeoutOf(timeout));
  }));
}

// The copies of one call of copy_weights().
struct CopyList {
  std::vector<CopyTuple> copies;
  uint64_t end_bytes = 0;  // end of the memory that the copies write
};

CopyList MakeCopyList(std::vector<CopyTuple> copies) {
  CopyList list{.copies = std::move(copies)};
  for (const auto& [partition, first_elem, offset, bytes] : list.copies) {
    list.end_bytes = std::max(list.end_bytes, offset + bytes);
  }
  return list;
}

// Copies weights to `size_bytes` bytes of device memory at `address`. The caller keeps the tensor at `address` alive until work
// of `stream` behind the copies has begun.
void CopyWeights(PyAttachment& self, const CopyList& list, uintptr_t address, uint64_t size_bytes,
                 double timeout, uintptr_t stream) {
  if (size_bytes < list.end_bytes) {
    Raise(MakeError(ErrorId::kRange, absl::StrCat("the weights take ", list.end_bytes,
                                                  " bytes, the tensor has ", size_bytes)));
  }
  auto* const to = reinterpret_cast<std::byte*>(address);
  std::vector<client::WeightsCopy> copies;
  copies.reserve(list.copies.size());
  for (const auto& [partition, first_elem, offset, bytes] : list.copies) {
    copies.push_back({partition, first_elem, {to + offset, bytes}});
  }
  const std::unique_ptr<gpu::Stream> copies_on = self.StreamOf(stream);
  Check(WithoutGil([&] { return self->CopyWeights(copies, *copies_on, TimeoutOf(timeout)); }));
}

void WriteInitial(PyAttachment& self, uint32_t group, const Buffer& buffer, double timeout) {
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(buffer.data()),
                                         buffer.nbytes());
  Check(WithoutGil([&] { return self->WriteInitial(group, bytes, TimeoutOf(timeout)); }));
}

void WriteState(PyAttachment& self, uint32_t partition, uint64_t first_elem,
                const std::string& state, const Buffer& buffer, double timeout) {
  const std::span<const float> values(static_cast<const float*>(buffer.data()),
                                      buffer.nbytes() / sizeof(float));
  Check(WithoutGil(
      [&] { return self->WriteState(partition, first_elem, state, values, TimeoutOf(timeout)); }));
}

void WriteUpdates(PyAttachment& self, uint32_t param, uint64_t updates, double timeout) {
  Check(WithoutGil([&] { return self->WriteUpdates(param, updates, TimeoutOf(timeout)); }));
}

// The bytes of all ranks.
nb::list Exchange(PyAttachment& self, const nb::bytes& bytes, double timeout) {
  const std::string own(bytes.c_str(), bytes.size());
  const std::vector<std::string> all =
      ValueOrThrow(WithoutGil([&] { return self->Exchange(own, TimeoutOf(timeout)); }));
  nb::list list;
  for (const std::string& one : all) list.append(nb::bytes(one.data(), one.size()));
  return list;
}

uint64_t Fetch(PyAttachment& self, uint32_t group, double timeout) {
  const uint64_t lease =
      ValueOrThrow(WithoutGil([&] { return self->Fetch(group, TimeoutOf(timeout)); })).id;
  self.leases.insert(lease);
  return lease;
}

void Release(PyAttachment& self, uint64_t lease) {
  self.leases.erase(lease);
  Check(WithoutGil([&] { return self->Release({.id = lease, .partition = 0, .bytes = {}}); }));
}

// Releases all leases, including leases whose number Python lost to an exception between the call and its result.
void ReleaseAll(PyAttachment& self) {
  while (!self.leases.empty()) Release(self, *self.leases.begin());
}

// Errors  E_OPTION  names what the optimizer does not have, or lacks, or a value outside its range.
protocol::HyperParams HyperParamsOf(protocol::Optimizer optimizer, size_t group,
                                    const HyperDict& values) {
  protocol::HyperParams params;
  std::vector<std::string> wanted;
  for (const protocol::HyperParamInfo& info : protocol::Info(optimizer).hyper_params) {
    wanted.emplace_back(info.name);
    const auto value = values.find(wanted.back());
    if (value != values.end()) params.*info.field = value->second;
  }
  std::vector<std::string> given;
  for (const auto& [name, value] : values) given.push_back(name);
  if (!std::ranges::is_permutation(wanted, given)) {
    Raise(MakeError(ErrorId::kOption,
                    absl::StrCat("parameter group ", group, ": ", std::string(Name(optimizer)),
                                 " has the hyper-parameters ", absl::StrJoin(wanted, ", "),
                                 "; given are ", absl::StrJoin(given, ", "))));
  }
  const absl::Status checked = protocol::CheckHyperParams(optimizer, params);
  if (!checked.ok()) {
    Raise(MakeError(ErrorId::kOption,
                    absl::StrCat("parameter group ", group, ": ", checked.message())));
  }
  return params;
}

void CheckHyper(const std::string& optimizer, size_t group, const HyperDict& values) {
  HyperParamsOf(ValueOrThrow(protocol::OptimizerFromName(optimizer)), group, values);
}

// Optimizer -> hyper-parameter -> default.
nb::dict Optimizers() {
  nb::dict optimizers;
  for (const protocol::OptimizerInfo& info : protocol::kOptimizers) {
    nb::dict defaults;
    for (const protocol::HyperParamInfo& hyper : info.hyper_params) {
      defaults[std::string(hyper.name).c_str()] = hyper.initial;
    }
    optimizers[std::string(info.name).c_str()] = defaults;
  }
  return optimizers;
}

std::vector<protocol::HyperParams> HyperParamsOf(PyAttachment& self,
                                                 const std::vector<HyperDict>& hyper) {
  std::vector<protocol::HyperParams> params;
  for (const HyperDict& values : hyper) {
    params.push_back(HyperParamsOf(self->layout().spec().optimizer, params.size(), values));
  }
  return params;
}

void AnnounceStep(PyAttachment& self, uint64_t t, const std::vector<HyperDict>& hyper,
                  double timeout, double grad_scale, double grad_min, double grad_max) {
  const client::GradientEdit edit{.scale = grad_scale, .min = grad_min, .max = grad_max};
  const std::vector<protocol::HyperParams> params = HyperParamsOf(self, hyper);
  const absl::Status announced =
      WithoutGil([&] { return self->AnnounceStep(t, params, TimeoutOf(timeout), edit); });
  self.GiveUpEnded();
  Check(announced);
}

nb::tuple Step(PyAttachment& self, uint64_t t, const std::vector<HyperDict>& hyper,
               double max_grad_norm, const nb::bytes& extra_state, double timeout,
               double grad_scale, double grad_min, double grad_max,
               const std::vector<nb::bytes>& buffers) {
  const client::GradientEdit edit{.scale = grad_scale, .min = grad_min, .max = grad_max};
  const std::vector<protocol::HyperParams> params = HyperParamsOf(self, hyper);
  std::vector<client::ExtraState::Bytes> front;
  for (const nb::bytes& part : buffers) front.push_back(BytesOf(part));
  const client::ExtraState extra(front, BytesOf(extra_state));
  absl::StatusOr<client::StepResult> stepped = WithoutGil(
      [&] { return self->Step(t, params, max_grad_norm, extra, TimeoutOf(timeout), edit); });
  self.GiveUpEnded();
  const client::StepResult result = ValueOrThrow(std::move(stepped));
  return nb::make_tuple(result.committed_step, result.norm, result.clipped, result.repeated);
}

// (float32 values of consecutive elements, updates that the parameter has had).
nb::tuple ReadState(PyAttachment& self, const std::string& param, const std::string& state,
                    uint64_t first, uint64_t elems, double timeout) {
  const client::StateRange range{.param = param, .state = state, .first_elem = first};
  Check(self->CheckStateRange(range, elems));  // checks before memory is allocated
  auto values = std::make_shared<std::vector<float>>(elems);
  const uint64_t updates =
      ValueOrThrow(WithoutGil([&] { return self->ReadState(range, *values, TimeoutOf(timeout)); }));
  return nb::make_tuple(MakeView(std::as_bytes(std::span(*values)), DType::kFloat32, values),
                        updates);
}

nb::dict CountersDict(PyAttachment& self) {
  const client::Counters counters = self->counters();
  nb::dict dict;
  dict["rpc_calls"] = counters.rpc_calls;
  dict["commands"] = counters.commands;
  dict["sleeps"] = counters.sleeps;
  dict["wait_ns_fetch"] = counters.wait_ns_fetch;
  dict["wait_ns_grad"] = counters.wait_ns_grad;
  dict["wait_ns_step"] = counters.wait_ns_step;
  dict["wait_ns_other"] = counters.wait_ns_other;
  dict["wait_ns_total"] = counters.wait_ns_fetch + counters.wait_ns_grad + counters.wait_ns_step +
                          counters.wait_ns_other;
  dict["fetched_bytes"] = counters.fetched_bytes;
  dict["copied_bytes"] = counters.copied_bytes;
  dict["grad_bytes"] = counters.grad_bytes;
  dict["private_slots"] = counters.private_slots;
  dict["reattaches"] = counters.reattaches;
  return dict;
}

void BindAttachment(nb::module_& module) {
  constexpr double kTimeout = 60.0;
  nb::class_<PyAttachment>(module, "Attachment")
      .def_prop_ro("writes_initial", [](PyAttachment& self) { return self->writes_initial(); })
      .def_prop_ro("weights_on_swap", [](PyAttachment& self) { return self->weights_on_swap(); })
      .def_prop_ro("committed_step", [](PyAttachment& self) { return self->committed_step(); })
      .def_prop_ro("went_back_from", [](PyAttachment& self) { return self->went_back_from(); })
      .def_prop_ro("extra_state",
                   [](PyAttachment& self) {
                     const auto bytes = self->extra_state();
                     return nb::bytes(bytes.data(), bytes.size());
                   })
      .def_prop_ro("rank0_extra_state",
                   [](PyAttachment& self) {
                     const auto bytes = self->rank0_extra_state();
                     return nb::bytes(bytes.data(), bytes.size());
                   })
      .def_prop_ro("device_access", [](PyAttachment& self) { return self->device_access(); })
      .def_prop_ro("trace", &TraceGroups)
      .def_prop_ro("groups", &Groups)
      .def_prop_ro("param_offsets", &ParamOffsets)
      .def_prop_ro("rank", [](PyAttachment& self) { return self->rank(); })
      .def_prop_ro("boxes", &Boxes)
      .def_prop_ro("states", &States)
      .def("weights", &Weights, nb::arg("group"))
      .def("window", &Window)
      .def("allow_weight_writes", [](PyAttachment& self) { Check(self->AllowWeightWrites()); })
      .def_prop_ro("has_written_weights",
                   [](PyAttachment& self) { return self->has_written_weights(); })
      .def("written_weights", &WrittenWeights)
      .def("daemon_window", &DaemonWindow)
      .def("drop_written_weights", [](PyAttachment& self) { self->DropWrittenWeights(); })
      .def("locate", &Locate, nb::arg("partitions"), nb::arg("timeout") = kTimeout)
      .def("locate_ahead", &LocateAhead, nb::arg("partitions"), nb::arg("timeout") = kTimeout)
      .def("write_initial", &WriteInitial, nb::arg("group"), nb::arg("buffer"),
           nb::arg("timeout") = kTimeout)
      .def("write_state", &WriteState, nb::arg("partition"), nb::arg("first_elem"),
           nb::arg("state"), nb::arg("values"), nb::arg("timeout") = kTimeout)
      .def("write_updates", &WriteUpdates, nb::arg("param"), nb::arg("updates"),
           nb::arg("timeout") = kTimeout)
      .def("exchange", &Exchange, nb::arg("own"), nb::arg("timeout") = kTimeout)
      .def(
          "initial_done",
          [](PyAttachment& self, double timeout) {
            Check(WithoutGil([&] { return self->InitialDone(TimeoutOf(timeout)); }));
          },
          nb::arg("timeout") = kTimeout)
      .def("copy_weights", &CopyWeights, nb::arg("copies"), nb::arg("address"),
           nb::arg("size_bytes"), nb::arg("timeout") = kTimeout, nb::arg("stream") = 0)
      .def("fetch", &Fetch, nb::arg("group"), nb::arg("timeout") = kTimeout)
      .def("release", &Release, nb::arg("lease"))
      .def("release_all", &ReleaseAll)
      .def("grad_slot", &GradSlot, nb::arg("group"), nb::arg("timeout") = kTimeout,
           nb::arg("zero") = true)
      .def(
          "grad_ready",
          [](PyAttachment& self, uint32_t group) {
            Check(WithoutGil([&] { return self->GradReady(group); }));
          },
          nb::arg("group"))
      .def("add_gradient", &AddGradient, nb::arg("param"), nb::arg("gradient"),
           nb::arg("timeout") = kTimeout)
      .def("add_device_gradient", &AddDeviceGradient, nb::arg("param"), nb::arg("address"),
           nb::arg("size_bytes"), nb::arg("stream"), nb::arg("keep"), nb::arg("timeout") = kTimeout)
      .def(
          "flush_gradients",
          [](PyAttachment& self, std::optional<uint32_t> group) {
            Check(WithoutGil([&] { return self->FlushGradients(group); }));
          },
          nb::arg("group") = nb::none())
      .def("begin_pass",
           [](PyAttachment& self) { Check(WithoutGil([&] { return self->BeginPass(); })); })
      .def(
          "grad_norm",
          [](PyAttachment& self, std::optional<uint32_t> param, double timeout) {
            return ValueOrThrow(
                WithoutGil([&] { return self->GradNorm(param, TimeoutOf(timeout)); }));
          },
          nb::arg("param").none(), nb::arg("timeout") = kTimeout)
      .def("drop_gradients",
           [](PyAttachment& self) {
             const absl::Status dropped = WithoutGil([&] { return self->DropGradients(); });
             self.GiveUpEnded();
             Check(dropped);
           })
      .def("announce_step", &AnnounceStep, nb::arg("t"), nb::arg("hyper"),
           nb::arg("timeout") = kTimeout, nb::arg("grad_scale") = 1.0,
           nb::arg("grad_min") = -std::numeric_limits<double>::infinity(),
           nb::arg("grad_max") = std::numeric_limits<double>::infinity())
      .def("step", &Step, nb::arg("t"), nb::arg("hyper"), nb::arg("max_grad_norm") = 0.0,
           nb::arg("extra_state") = nb::bytes("", 0), nb::arg("timeout") = kTimeout,
           nb::arg("grad_scale") = 1.0,
           nb::arg("grad_min") = -std::numeric_limits<double>::infinity(),
           nb::arg("grad_max") = std::numeric_limits<double>::infinity(),
           nb::arg("buffers") = std::vector<nb::bytes>())
      .def("read_state", &ReadState, nb::arg("param"), nb::arg("state"), nb::arg("first"),
           nb::arg("elems"), nb::arg("timeout") = kTimeout)
      .def("counters", &CountersDict)
      .def("detach", [](PyAttachment& self) { Check(WithoutGil([&] { return self->Detach(); })); });
}

void BindActivationStore(nb::module_& module) {
  nb::class_<PyActivationStore>(module, "ActivationStore")
      .def(nb::init<PyAttachment&>(), nb::arg("attachment"))
      .def("save", &PyActivationStore::Save, nb::arg("address"), nb::arg("size_bytes"),
           nb::arg("stream"))
      .def(
          "has_left",
          [](PyActivationStore& self, uint64_t number) {
            return ValueOrThrow(self->HasLeft(number));
          },
          nb::arg("number"))
      .def(
          "leave_behind",
          [](PyActivationStore& self, uint64_t number, uintptr_t stream) {
            Check(self->LeaveBehind(number, *self.StreamOf(stream)));
          },
          nb::arg("number"), nb::arg("stream"))
      .def("load", &PyActivationStore::Load, nb::arg("number"), nb::arg("address"),
           nb::arg("size_bytes"), nb::arg("stream"))
      .def(
          "loaded_for",
          [](PyActivationStore& self, uint64_t number, uintptr_t stream) {
            Check(self->LoadedFor(number, *self.StreamOf(stream)));
          },
          nb::arg("number"), nb::arg("stream"))
      .def(
          "drop", [](PyActivationStore& self, uint64_t number) { Check(self->Drop(number)); },
          nb::arg("number"))
      .def_prop_ro("room_bytes", [](PyActivationStore& self) { return self->room_bytes(); })
      .def_prop_ro("used_bytes", [](PyActivationStore& self) { return self->used_bytes(); })
      .def_prop_ro("used_bytes_max",
                   [](PyActivationStore& self) { return self->used_bytes_max(); });
}

}  // namespace

NB_MODULE(_core, module) {
  // A trainer may end with its attachment alive; the daemon cleans up.
  nb::set_leak_warnings(false);
  module.attr("__version__") = FOREBAY_VERSION;
  BindErrors(module);
  BindAdmin(module);
  BindAttachment(module);
  BindActivationStore(module);
  module.attr("OPTIMIZERS") = Optimizers();
  module.def("check_hyper_parameters", &CheckHyper, nb::arg("optimizer"), nb::arg("group"),
             nb::arg("values"));
  module.def("attach", &Attach, nb::arg("options"));
  module.def("first_daemon_wait", &FirstDaemonWait, nb::arg("daemon_wait").none());
  nb::class_<CopyList>(module, "CopyList");
  module.def("copy_list", &MakeCopyList, nb::arg("copies"));
}

}  // namespace forebay::python
