// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/errors.h"

#include <string>

#include "protocol/error.h"

namespace forebay::python {
namespace nb = nanobind;
namespace {

// Borrowed for the life of the module, which is that of the process.
struct Families {
  PyObject* base = nullptr;
  PyObject* usage = nullptr;
  PyObject* resource = nullptr;
  PyObject* unavailable = nullptr;
  PyObject* timeout = nullptr;
  PyObject* data_loss = nullptr;
};

Families families;

PyObject* NewClass(nb::module_& module, const char* name, const char* doc, nb::handle bases) {
  const std::string qualified = std::string("forebay.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), nullptr);
  if (made == nullptr) throw nb::python_error();
  module.attr(name) = nb::handle(made);
  return made;
}

nb::handle FamilyOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
      return families.usage;
    case absl::StatusCode::kResourceExhausted:
      return families.resource;
    case absl::StatusCode::kUnavailable:
      return families.unavailable;
    case absl::StatusCode::kDeadlineExceeded:
      return families.timeout;
    case absl::StatusCode::kDataLoss:
      return families.data_loss;
    default:
      return families.base;
  }
}

}  // namespace

void BindErrors(nb::module_& module) {
  families.base = NewClass(module, "ForebayError",
                           "An error of forebay's. code: its stable id, as \"E_SWAP_NOSPC\"; hint: "
                           "what helps, or \"\"; retryable: attach again, or release "
                           "something, and retry.",
                           PyExc_RuntimeError);
  const nb::handle base(families.base);
  base.attr("code") = "E_INTERNAL";
  base.attr("hint") = "";
  base.attr("retryable") = false;
  families.usage = NewClass(module, "UsageError",
                            "Fix the caller; after E_BUSY wait until what it names is over.", base);
  families.resource =
      NewClass(module, "ResourceError", "Release something or raise the limit, then retry.", base);
  families.unavailable =
      NewClass(module, "UnavailableError", "Reconnect: attach again, then retry.", base);
  const nb::tuple timeout_bases = nb::make_tuple(base, nb::handle(PyExc_TimeoutError));
  families.timeout = NewClass(module, "ForebayTimeoutError",
                              "The call's time ran out; its outcome is unknown.", timeout_bases);
  families.data_loss =
      NewClass(module, "DataLossError", "The bytes are gone: restore from a checkpoint.", base);
}

void Raise(const absl::Status& status) {
  const protocol::ErrorId id = protocol::IdOf(status);
  if (id == protocol::ErrorId::kInterrupted && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  const nb::handle family = FamilyOf(status);
  const std::string text = protocol::FormatError(status);
  const std::string hint = protocol::HintOf(status);
  const std::string code(protocol::Info(id).name);
  const nb::object error = family(nb::str(text.c_str(), text.size()));
  error.attr("code") = nb::str(code.c_str(), code.size());
  error.attr("hint") = nb::str(hint.c_str(), hint.size());
  error.attr("retryable") = protocol::IsRetryable(status);
  PyErr_SetObject(family.ptr(), error.ptr());
  throw nb::python_error();
}

}  // namespace forebay::python
