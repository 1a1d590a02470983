// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/kv/striped_allocator.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

/// Guards the allocators. The GIL does, too, where there is one.
std::mutex allocators;

/// Calls a member function of an allocator; nothing of Python is called meanwhile.
template <auto call, class Allocator, class... Args>
auto guarded(Allocator& self, Args&&... args) {
  const std::scoped_lock lock(allocators);
  return (self.*call)(std::forward<Args>(args)...);
}

StripedAllocator make_allocator(
    py::handle size, py::handle page_size, py::handle shard_size, py::handle need_sort
) {
  const Arguments read("StripedAllocator");
  return StripedAllocator({
      .size = read.integer(size, "size"),
      .page_size = read.integer(page_size, "page_size"),
      .shard_size = read.integer(shard_size, "shard_size"),
      .need_sort = read.flag(need_sort, "need_sort"),
  });
}

/// A list of int or None, whose None are replaced.
class BasesArgument {
 public:
  BasesArgument(const Arguments& read, py::handle object)
      : name_(read.name("rotation_bases")), list_(object) {
    if (!PyList_Check(object.ptr())) {
      refuse_type(name_, " must be a list of int or None, got ", type_name(object));
    }
    const py::tuple items = kept_items(object);
    for (std::size_t i = 0; i < items.size(); ++i) {
      const py::handle item = items[i];
      bases_.push_back(
          item.is_none() ? std::nullopt
                         : std::optional(int64_element(item.ptr(), name_, static_cast<int>(i)))
      );
      given_.push_back(!item.is_none());
    }
  }
  std::vector<std::optional<int64_t>>& operator*() { return bases_; }

  /// Must be called before any change of state: Python code of arguments may have changed the list.
  void check_length() const {
    check(
        PyList_GET_SIZE(list_.ptr()) == static_cast<Py_ssize_t>(bases_.size()), name_,
        " must not change during the call"
    );
  }
  void write_back() const {
    for (std::size_t i = 0; i < bases_.size(); ++i) {
      if (given_[i]) continue;
      py::object base = py::int_(*bases_[i]);
      const auto index = static_cast<Py_ssize_t>(i);
      if (PyList_SetItem(list_.ptr(), index, base.release().ptr()) != 0) {
        throw py::error_already_set();
      }
    }
  }

 private:
  ArgumentName name_;
  py::handle list_;
  std::vector<std::optional<int64_t>> bases_;
  std::vector<bool> given_;
};

py::object array_or_none(std::optional<std::vector<int64_t>> slots) {
  if (!slots) return py::none();
  return own_array(std::move(*slots));
}

py::object alloc_extend(
    StripedAllocator& self, py::handle prefix_lens, py::handle seq_lens, py::handle rotation_bases
) {
  const Arguments read("StripedAllocator.alloc_extend");
  const std::vector<int64_t> prefixes = read.ints(prefix_lens, "prefix_lens");
  const std::vector<int64_t> lens = read.ints(seq_lens, "seq_lens");
  BasesArgument bases(read, rotation_bases);
  bases.check_length();
  auto slots = guarded<&StripedAllocator::alloc_extend>(self, prefixes, lens, *bases);
  bases.write_back();
  return array_or_none(std::move(slots));
}

py::object alloc_cyclic(StripedAllocator& self, py::handle start_class, py::handle num_slots) {
  const Arguments read("StripedAllocator.alloc_cyclic");
  const int64_t start = read.integer(start_class, "start_class");
  const int64_t slots = read.integer(num_slots, "num_slots");
  return array_or_none(guarded<&StripedAllocator::alloc_cyclic>(self, start, slots));
}

void free_slots(StripedAllocator& self, py::handle slots) {
  const Arguments read("StripedAllocator.free");
  guarded<&StripedAllocator::free>(self, read.ints(slots, "slots"));
}

/// Plans for an engine that has its free pages in tensors: (pages of each class, rows), or None.
py::object plan_draw(
    const Interleave& pages,
    py::handle free_pages,
    py::handle prefix_lens,
    py::handle seq_lens,
    py::handle rotation_bases
) {
  const Arguments read("StripedAllocator.alloc_extend");
  const std::vector<int64_t> counts = read.ints(free_pages, "free_pages");
  const std::vector<int64_t> prefixes = read.ints(prefix_lens, "prefix_lens");
  const std::vector<int64_t> lens = read.ints(seq_lens, "seq_lens");
  BasesArgument bases(read, rotation_bases);
  bases.check_length();
  auto drawn = plan_striped_draw(pages, counts, prefixes, lens, *bases);
  bases.write_back();
  if (!drawn) return py::none();
  return py::make_tuple(drawn->needs, own_array(std::move(drawn->rows)));
}

py::tuple split_pages(const Interleave& pages, py::handle slots, py::handle end) {
  const Arguments read("StripedAllocator.free");
  const std::vector<int64_t> values = read.ints(slots, "slots");
  StripedPages split = split_striped_pages(pages, values, read.integer(end, "end"));
  return py::make_tuple(own_array(std::move(split.pages)), split.counts);
}

}  // namespace

// The GIL stays held: calls take microseconds, and the GIL serialises two threads.
void register_striped_allocator(py::module_& module) {
  module.def("plan_striped_draw", &plan_draw);
  module.def("split_striped_pages", &split_pages);
  py::class_<StripedAllocator>(module, "StripedAllocator", py::module_local())
      .def(py::init(&make_allocator))
      .def("alloc_extend", &alloc_extend)
      .def("alloc_cyclic", &alloc_cyclic)
      .def("free", &free_slots)
      .def(
          "class_free_page_counts",
          &guarded<&StripedAllocator::class_free_page_counts, const StripedAllocator>
      )
      .def(
          "least_full_class", &guarded<&StripedAllocator::least_full_class, const StripedAllocator>
      )
      .def("available_size", &guarded<&StripedAllocator::available_size, const StripedAllocator>)
      .def(
          "aggregate_free_size",
          &guarded<&StripedAllocator::aggregate_free_size, const StripedAllocator>
      )
      .def_property_readonly(
          "size", [](const StripedAllocator& self) { return self.config().size; }
      )
      .def_property_readonly(
          "page_size", [](const StripedAllocator& self) { return self.config().page_size; }
      )
      .def_property_readonly(
          "shard_size", [](const StripedAllocator& self) { return self.config().shard_size; }
      )
      .def_property_readonly("need_sort", [](const StripedAllocator& self) {
        return self.config().need_sort;
      });
}

}  // namespace cpattn::bindings
