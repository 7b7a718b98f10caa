// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/admin.h"

#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>

#include "client/admin.h"
#include "client/python/src/errors.h"
#include "client/python/src/timeout.h"
#include "protocol/json.h"

namespace forebay::python {
namespace nb = nanobind;
namespace {

using client::AdminClient;

std::unique_ptr<AdminClient> Connect(const std::string& socket, double timeout) {
  return ValueOrThrow(WithoutGil(
      [&] { return AdminClient::Connect({.socket = socket, .timeout = TimeoutOf(timeout)}); }));
}

// Converts a message to Python objects by way of the JSON that `forebay ... --json` prints.
nb::object ObjectOf(const capnp::DynamicValue::Reader& value) {
  return nb::module_::import_("json").attr("loads")(protocol::JsonOf(value));
}

nb::object Status(const std::string& socket, double timeout) {
  const std::unique_ptr<AdminClient> admin = Connect(socket, timeout);
  return ObjectOf(*ValueOrThrow(WithoutGil([&] { return admin->Status(); })));
}

nb::object Trace(const std::string& socket, const std::string& job, double timeout) {
  const std::unique_ptr<AdminClient> admin = Connect(socket, timeout);
  return ObjectOf(ValueOrThrow(WithoutGil([&] { return admin->Trace(job); }))->getEvents());
}

nb::object Plan(const std::string& socket, const std::string& job, double timeout) {
  const std::unique_ptr<AdminClient> admin = Connect(socket, timeout);
  return ObjectOf(*ValueOrThrow(WithoutGil([&] { return admin->PlanJob(job, std::nullopt); })));
}

void DeleteJob(const std::string& socket, const std::string& job, double timeout) {
  const std::unique_ptr<AdminClient> admin = Connect(socket, timeout);
  Check(WithoutGil([&] { return admin->DeleteJob(job); }));
}

}  // namespace

void BindAdmin(nb::module_& module) {
  module.def("status", &Status, nb::arg("socket") = "", nb::arg("timeout") = 10.0);
  module.def("trace", &Trace, nb::arg("socket"), nb::arg("job"), nb::arg("timeout") = 10.0);
  module.def("plan", &Plan, nb::arg("socket"), nb::arg("job"), nb::arg("timeout") = 10.0);
  module.def("delete_job", &DeleteJob, nb::arg("socket"), nb::arg("job"),
             nb::arg("timeout") = 10.0);
}

}  // namespace forebay::python
