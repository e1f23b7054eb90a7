// Memory of values that live no longer than a call: what groups pass to each other, temporaries,
// scratchpads.
//
// What a network frees, the C library gives back to the system, which clears every page of it again
// for the next call: 19,000 page faults for a mobilenet_v2 with 16 images. The arena keeps slabs
// and cuts blocks from them, the smallest free piece that is large enough, and joins free
// neighbours again. A call that needs more gets one more slab; when nothing is in use any more, one
// slab takes the place of them all. More than twice of what was needed during the last 4096
// allocations is given back. Slabs come from PyTorch's CPU allocator.
//
// The arena owns the slabs, a tensor its block, which returns when it dies, in whichever thread.
// No tensor that a user can hold may lie here: one small result would keep a slab.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace llga {

// False if the environment holds LLGA_FUSER_ARENA=off.
bool usesArena();

// Any thread may use it. PyTorch's allocator itself serves small blocks, and all of them where the
// arena is not used.
c10::Allocator* arena();

// Memory for a scratchpad, from the arena where that serves. releaseScratch() takes any that
// allocateScratch() gave.
void* allocateScratch(size_t bytes);
void releaseScratch(void* memory);

// Bytes of all slabs, used or not.
uint64_t arenaBytes();

// Gives back the slabs of which nothing is in use, as happens with the last ArenaUser.
void emptyArena();

// One for each plan.
class ArenaUser {
 public:
  ArenaUser();
  ~ArenaUser();
  ArenaUser(const ArenaUser&) = delete;
  ArenaUser& operator=(const ArenaUser&) = delete;
};

// While one exists, allocateScratch() uses the arena in this thread. Not for a first run of a plan:
// then oneDNN allocates what it keeps.
class ArenaForScratch {
 public:
  explicit ArenaForScratch(bool use);
  ~ArenaForScratch();
  ArenaForScratch(const ArenaForScratch&) = delete;
  ArenaForScratch& operator=(const ArenaForScratch&) = delete;

 private:
  bool before_;
};

}  // namespace llga
