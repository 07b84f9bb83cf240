// Graphs: nodes in the order in which they came, which their dependencies follow.
#pragma once

#include <cuda.h>

#include <memory>
#include <vector>

#include "queue.h"

namespace softcuda {

// One reference to a user object.
class Held;

struct Graph {
  std::vector<std::shared_ptr<CUgraphNode_st>> nodes;
  std::vector<std::shared_ptr<Held>> held;
};

}  // namespace softcuda

struct CUgraphNode_st {
  softcuda::Operation operation;
  std::vector<CUgraphNode> after;
};

struct CUgraph_st : softcuda::Graph {};

namespace softcuda {

CUgraph make_graph();
void destroy_graph(CUgraph graph);

}  // namespace softcuda
