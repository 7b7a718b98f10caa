// SPDX-License-Identifier: Apache-2.0
// EndedObjects: Python objects whose last owner may be a thread without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "protocol/os/mutex.h"

namespace forebay::python {

// Python objects to release: sources of copies to a device that have ended, and the callable all_gather. Their last owner
// may be a thread without the GIL, which puts them here. GiveUp() drops the references later.
//
// Threads  Any; GiveUp() with the GIL.
class EndedObjects {
 public:
  static std::shared_ptr<const void> Keep(const std::shared_ptr<EndedObjects>& ended,
                                          nanobind::object object) {
    return {object.release().ptr(), [ended](const void* kept) {
              const protocol::MutexLock lock(ended->mutex_);
              ended->objects_.push_back(static_cast<PyObject*>(const_cast<void*>(kept)));
            }};
  }

  void GiveUp() {  // call with the GIL held
    std::vector<PyObject*> objects;
    {
      const protocol::MutexLock lock(mutex_);
      objects.swap(objects_);
    }
    for (PyObject* const object : objects) Py_DECREF(object);
  }

 private:
  protocol::Mutex mutex_;
  std::vector<PyObject*> objects_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace forebay::python
