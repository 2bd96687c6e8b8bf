// How work is shared out.

#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

#include "team.h"

namespace {

// How many threads work for the calling one; 0: as many as would for torch.
thread_local int own_threads = 0;

int num_threads() { return own_threads > 0 ? own_threads : at::get_num_threads(); }

// Calls function(begin, end) for pieces of 0 .. count. Threads fetch piece by piece, because a thread that the
// system holds up would let all others wait for its share.
template <typename Function>
void for_pieces(int64_t count, int64_t piece, const Function& function) {
  Team::instance().share(count, piece, num_threads(), function);
}

}  // namespace
