#include "log.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>

namespace softcuda {

void say(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  // In one piece, since several processes share the stream.
  dprintf(STDERR_FILENO, "softcuda[%d]: %s\n", getpid(), text);
}

std::string thread_name() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

}  // namespace softcuda
