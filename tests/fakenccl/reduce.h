// What NCCL computes, of all ranks' elements.
#pragma once
#include <string>
#include <vector>

#include "abi.h"

namespace fakenccl {

// The bytes of an element; 0: there is no such type.
size_t size_of(Type type);

// Multiplies elements by a factor, which is one element.
void scale(std::string& elements, const char* factor, Type type);

// Folds what all ranks have, which is as long everywhere.
void fold(char* into, const std::vector<std::string>& ranks, Type type, Op op);

}  // namespace fakenccl
