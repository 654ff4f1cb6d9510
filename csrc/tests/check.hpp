// The smallest test harness: a failed check prints its place and ends the executable.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

#define CHECK_THROWS(exception, statement)                                             \
  do {                                                                                 \
    bool threw = false;                                                                \
    try {                                                                              \
      statement;                                                                       \
    } catch (const exception&) {                                                       \
      threw = true;                                                                    \
    }                                                                                  \
    if (!threw) {                                                                      \
      std::fprintf(stderr, "%s:%d: no %s from %s\n", __FILE__, __LINE__, #exception,   \
                   #statement);                                                        \
      std::exit(1);                                                                    \
    }                                                                                  \
  } while (false)
