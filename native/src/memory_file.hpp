// Files that are memory: other processes can map them, and nothing of them can be left behind.
#pragma once

#include <cstddef>

namespace farandole {

// The descriptor of a new file of `bytes` zero bytes, which has no name and is this user's alone.
// Throws std::system_error.
int create_memory_file(std::size_t bytes);

}  // namespace farandole
