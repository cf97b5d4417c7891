#include "memory_file.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

namespace farandole {

int create_memory_file(std::size_t bytes) {
  // A memfd has no name: whatever is killed and when, nothing of it can be left behind.
  const int descriptor = memfd_create("farandole", MFD_CLOEXEC);
  if (descriptor < 0) {
    throw std::system_error(errno, std::generic_category(), "cannot create shared memory");
  }
  if (fchmod(descriptor, S_IRUSR | S_IWUSR) != 0 ||
      ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(descriptor);
    throw std::system_error(error, std::generic_category(),
                            "cannot size shared memory to " + std::to_string(bytes) + " bytes");
  }
  return descriptor;
}

}  // namespace farandole
