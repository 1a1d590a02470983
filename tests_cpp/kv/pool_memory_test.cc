// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/pool_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpattn/base/address_space.h"
#include "cpattn/transfer/registered_memory.h"

namespace cpattn {
namespace {

const auto kPage = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));

/// Pages of memory with these protections, and nothing behind them.
class Pages {
 public:
  explicit Pages(const std::vector<int>& protections) : size_((protections.size() + 1) * kPage) {
    data_ = mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (std::size_t i = 0; i < protections.size(); ++i) {
      mprotect(reinterpret_cast<void*>(page(i)), kPage, protections[i]);
    }
  }
  ~Pages() { munmap(data_, size_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  uint64_t page(std::size_t i) const { return reinterpret_cast<uint64_t>(data_) + i * kPage; }

 private:
  void* data_;
  uint64_t size_;
};

TEST(AddressSpace, KnowsWhatCanBeReadAndWritten) {
  constexpr int kBoth = PROT_READ | PROT_WRITE;
  const Pages pages({kBoth, kBoth, PROT_READ, kBoth, PROT_NONE});
  const AddressSpace space = AddressSpace::now("test");
  const auto gap = [&](std::size_t page, uint64_t offset, uint64_t size) {
    return space.find_gap(pages.page(page) + offset, size);
  };
  EXPECT_EQ(gap(0, 0, 2 * kPage), std::nullopt);
  EXPECT_EQ(gap(0, kPage - 1, 2), std::nullopt);
  EXPECT_EQ(gap(0, 1, 2 * kPage), pages.page(2));
  EXPECT_EQ(gap(0, 0, UINT64_MAX - pages.page(0)), pages.page(2));
  EXPECT_EQ(gap(2, 5, 1), pages.page(2) + 5);
  EXPECT_EQ(gap(3, 0, kPage), std::nullopt);
  EXPECT_EQ(gap(3, 0, kPage + 1), pages.page(4));
  EXPECT_EQ(gap(5, 0, 1), pages.page(5));
  EXPECT_EQ(gap(5, 0, 0), std::nullopt);
  EXPECT_EQ(space.find_gap(0, 1), uint64_t{0});
  EXPECT_EQ(space.find_gap(UINT64_MAX, 1), UINT64_MAX);
}

TEST(PoolMemory, IsFoundByItsAddresses) {
  const auto a = PoolMemory::make("test", 10 * kPage);
  const auto b = PoolMemory::make("test", 1);
  using Found = std::vector<std::shared_ptr<PoolMemory>>;
  EXPECT_EQ(PoolMemory::find(a->addr(), 1), Found{a});
  EXPECT_EQ(PoolMemory::find(a->addr() + 10 * kPage - 1, 1), Found{a});
  EXPECT_EQ(PoolMemory::find(b->addr(), 1), Found{b});
  EXPECT_EQ(PoolMemory::find(a->addr(), 0), Found{});
  EXPECT_EQ(PoolMemory::find(0, 1), Found{});
  EXPECT_EQ(PoolMemory::find(UINT64_MAX, 1), Found{});
  const Found all = PoolMemory::find(0, UINT64_MAX);
  EXPECT_EQ(all, a->addr() < b->addr() ? (Found{a, b}) : (Found{b, a}));
  EXPECT_TRUE(a->contains(a->addr(), 10 * kPage));
  EXPECT_FALSE(a->contains(a->addr() + 1, 10 * kPage));
  EXPECT_FALSE(a->contains(a->addr() - 1, 1));
  EXPECT_FALSE(a->contains(a->addr() + 1, UINT64_MAX));
}

TEST(PoolMemory, RefusesNodes) {
  for (const int node : {-1, 1024}) {
    EXPECT_THROW(PoolMemory::make("test", kPage, std::vector{0, node}), std::invalid_argument);
  }
}

TEST(PoolMemory, LivesAsLongAsSomebodyHasIt) {
  auto memory = PoolMemory::make("test", kPage);
  const uint64_t addr = memory->addr();
  auto owners = own_memory("test", std::vector{addr}, std::vector{kPage});
  memory.reset();
  EXPECT_EQ(AddressSpace::now("test").find_gap(addr, kPage), std::nullopt);
  *reinterpret_cast<volatile char*>(addr) = 7;
  owners.clear();
  EXPECT_EQ(AddressSpace::now("test").find_gap(addr, kPage), addr);
  EXPECT_TRUE(PoolMemory::find(addr, kPage).empty());
}

TEST(own_memory, RefusesWhatIsNoMemory) {
  const Pages pages({PROT_READ | PROT_WRITE, PROT_READ});
  const auto pool = PoolMemory::make("test", 4 * kPage);
  const auto own = [](std::vector<uint64_t> addrs, std::vector<uint64_t> sizes, bool on_host) {
    return own_memory("test", addrs, sizes, on_host);
  };
  const auto owners =
      own({pool->addr() + 5, pages.page(0), pool->addr(), 0}, {kPage, kPage, 4 * kPage, 0}, true);
  EXPECT_EQ(owners[0], MemoryOwners{pool});
  EXPECT_TRUE(owners[1].empty());
  EXPECT_EQ(owners[2], MemoryOwners{pool});
  EXPECT_TRUE(owners[3].empty());
  EXPECT_THROW(own({pages.page(0)}, {kPage + 1}, true), std::invalid_argument);
  EXPECT_THROW(own({pages.page(1)}, {1}, true), std::invalid_argument);
  EXPECT_THROW(own({pool->addr() + 1}, {uint64_t{1} << 46}, true), std::invalid_argument);
  EXPECT_THROW(own({UINT64_MAX}, {2}, false), std::invalid_argument);
  EXPECT_TRUE(own({pages.page(1)}, {1}, false)[0].empty());  // as an address of a device
}

/// The last owner may let go while others look.
TEST(PoolMemory, IsSafeBetweenThreads) {
  std::atomic<bool> done = false;
  std::thread looking([&done] {
    while (!done) {
      for (const auto& memory : PoolMemory::find(0, UINT64_MAX)) *memory->data() = 1;
    }
  });
  for (int i = 0; i < 2000; ++i) PoolMemory::make("test", kPage);
  done = true;
  looking.join();
}

/// A file in memory.
class File {
 public:
  explicit File(uint64_t num_bytes)
      : fd_(static_cast<int>(syscall(SYS_memfd_create, "part", 1U))) {  // MFD_CLOEXEC
    EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(num_bytes)), 0);
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  SharedPart part(uint64_t first_page, uint64_t num_pages, bool own = false) const {
    const auto page = static_cast<int64_t>(kPage);
    return {
        .fd = fd_,
        .offset = static_cast<int64_t>(first_page) * page,
        .num_bytes = static_cast<int64_t>(num_pages) * page,
        .own = own,
    };
  }

 private:
  int fd_;
};

#if !defined(__SANITIZE_THREAD__)  // which forks badly
TEST(PoolMemory, IsFoundByChildrenForkedMeanwhile) {
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done.load()) PoolMemory::find(0, UINT64_MAX);
  });
  int status = 0;
  for (int i = 0; i < 100 && status == 0; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);  // ends a child that waits for a thread which it does not have
      PoolMemory::find(0, UINT64_MAX);
      _exit(0);
    }
    waitpid(child, &status, 0);
  }
  done.store(true);
  other.join();
  EXPECT_EQ(status, 0);
}
#endif

TEST(PoolMemory, PartsOfFilesFollowEachOther) {
  const File a(4 * kPage), b(4 * kPage);
  const std::vector<SharedPart> parts = {
      a.part(0, 1, true), b.part(0, 2), a.part(1, 3, true), b.part(2, 2)
  };
  const auto one = PoolMemory::map("test", parts), other = PoolMemory::map("test", parts);
  ASSERT_EQ(one->num_bytes(), static_cast<int64_t>(8 * kPage));
  EXPECT_NE(one->addr(), other->addr());
  for (uint64_t page = 0; page < 8; ++page) one->data()[page * kPage] = static_cast<char>(page + 1);
  for (uint64_t page = 0; page < 8; ++page) EXPECT_EQ(other->data()[page * kPage], page + 1);
  const auto in_b = PoolMemory::map("test", std::vector{b.part(0, 4)});
  EXPECT_EQ(in_b->data()[0], 2);
  EXPECT_EQ(in_b->data()[2 * kPage], 7);
  EXPECT_EQ(PoolMemory::find(one->addr() + 8 * kPage - 1, 1).at(0), one);
}

TEST(PoolMemory, RefusesPartsThatAreNoMemory) {
  const File file(2 * kPage);
  const auto map = [](const SharedPart& part) {
    return PoolMemory::map("test", std::vector{part});
  };
  EXPECT_THROW(PoolMemory::map("test", {}), std::invalid_argument);
  EXPECT_THROW(map(file.part(0, 0)), std::invalid_argument);
  EXPECT_THROW(map(file.part(1, 2)), std::invalid_argument);  // the file was cut
  SharedPart odd = file.part(0, 1);
  odd.offset = 1;
  EXPECT_THROW(map(odd), std::invalid_argument);
  SharedPart none = file.part(0, 1);
  none.fd = -1;
  EXPECT_THROW(map(none), std::invalid_argument);
  const auto page = static_cast<int64_t>(kPage);
  EXPECT_THROW(
      map({.fd = file.part(0, 1).fd, .offset = page, .num_bytes = INT64_MAX / page * page}),
      std::invalid_argument
  );
}

}  // namespace
}  // namespace cpattn
