#include "graph.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "call.h"
#include "context.h"
#include "leaks.h"
#include "stream.h"

struct CUuserObject_st {
  void* data;
  CUhostFn destroy;
  std::atomic<unsigned> references;
};

namespace softcuda {

namespace {

// A thread of CUDA's own runs destructors, as real drivers do: the caller may hold locks that they take.
void drop(CUuserObject object, unsigned references) {
  if (object->references -= references) return;
  std::thread([object] {
    const Callback scope("the destructor of a user object");
    object->destroy(object->data);
    delete object;
  }).detach();
}

}  // namespace

class Held {
 public:
  explicit Held(CUuserObject object) : object_(object) {}
  ~Held() { drop(object_, 1); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  CUuserObject object_;
};

namespace {

// One node of a program: on which branch, and which nodes of other branches it comes after.
struct Step {
  std::shared_ptr<CUgraphNode_st> node;
  size_t branch;
  std::vector<CUgraphNode> others;
};

}  // namespace

// A graph made ready. Launches under way hold it, so that it may be destroyed meanwhile.
class Program {
 public:
  Program(const Graph& graph, int device);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Under the lock of the state.
  static void launch(const std::shared_ptr<Program>& program, CUstream stream);

 private:
  std::vector<Step> steps_;
  std::vector<std::shared_ptr<Held>> held_;
  // Branch 0 runs on the stream of the launch.
  std::vector<CUstream> branches_;
  Point last_{};
};

Program::Program(const Graph& graph, int device) : held_(graph.held) {
  std::map<CUgraphNode, size_t> ends;  // of branches, which the next node may go on
  std::map<CUgraphNode, size_t> branch_of;
  size_t count = 0;
  for (const auto& node : graph.nodes) {
    Step step{node, 0, {}};
    const auto goes_on = std::find_if(node->after.begin(), node->after.end(), [&](auto it) { return ends.count(it); });
    if (goes_on != node->after.end()) {
      step.branch = ends[*goes_on];
      ends.erase(*goes_on);
    } else {
      step.branch = count++;
    }
    for (CUgraphNode before : node->after) {
      if (branch_of[before] != step.branch) step.others.push_back(before);
    }
    ends[node.get()] = branch_of[node.get()] = step.branch;
    steps_.push_back(std::move(step));
  }
  for (size_t i = 1; i < count; ++i) branches_.push_back(create_stream(device, CU_STREAM_NON_BLOCKING, 0));
}

Program::~Program() {
  for (CUstream branch : branches_) destroy_stream(branch);
}

void Program::launch(const std::shared_ptr<Program>& program, CUstream stream) {
  Program& self = *program;
  // One launch of a program after the other, on whatever streams.
  if (self.last_.progress) push_wait(stream, self.last_);
  const Point start = last_of(stream);
  for (CUstream branch : self.branches_) push_wait(branch, start);
  std::map<CUgraphNode, Point> points;
  for (const Step& step : self.steps_) {
    CUstream on = step.branch ? self.branches_[step.branch - 1] : stream;
    for (CUgraphNode before : step.others) push_wait(on, points[before]);
    Operation operation = step.node->operation;
    operation.run = [program, run = operation.at_launch ? operation.at_launch() : operation.run] { run(); };
    push(on, std::move(operation));
    points[step.node.get()] = last_of(on);
  }
  for (CUstream branch : self.branches_) push_wait(stream, last_of(branch));
  self.last_ = last_of(stream);
}

CUgraph make_graph() {
  auto* graph = new CUgraph_st;
  note_made(Kind::Graph, key_of(graph));
  return graph;
}

void destroy_graph(CUgraph graph) {
  note_gone(Kind::Graph, key_of(graph));
  delete graph;
}

}  // namespace softcuda

struct CUgraphExec_st {
  std::shared_ptr<softcuda::Program> program;
};

using namespace softcuda;

namespace {

// Writes a list the way the interface does: as many as there is room for, and how many there are.
template <class Item, class Source>
void give(Item* items, size_t* count, const std::vector<Source>& all, Item (*convert)(const Source&)) {
  if (items) {
    for (size_t i = 0; i < all.size() && i < *count; ++i) items[i] = convert(all[i]);
  }
  *count = all.size();
}

}  // namespace

API cuGraphCreate(CUgraph* graph, unsigned) {
  ENTER(Plain);
  *graph = make_graph();
  return CUDA_SUCCESS;
}

API cuGraphDestroy(CUgraph graph) {
  ENTER(Plain);
  Lock lock(state());
  if (!check_handle(Kind::Graph, graph)) return CUDA_ERROR_INVALID_HANDLE;
  destroy_graph(graph);
  return CUDA_SUCCESS;
}

API cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  ENTER(Plain);
  Lock lock(state());
  give<CUgraphNode, std::shared_ptr<CUgraphNode_st>>(nodes, count, graph->nodes, [](const auto& n) { return n.get(); });
  return CUDA_SUCCESS;
}

API cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  ENTER(Plain);
  *type = node->operation.type;
  return CUDA_SUCCESS;
}

API cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* before, CUgraphEdgeData* edges, size_t* count) {
  ENTER(Plain);
  Lock lock(state());
  if (edges) std::fill(edges, edges + std::min(*count, node->after.size()), CUgraphEdgeData{});
  give<CUgraphNode, CUgraphNode>(before, count, node->after, [](const CUgraphNode& n) { return n; });
  return CUDA_SUCCESS;
}

API cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long) {
  ENTER(Plain);
  Lock lock(state());
  if (!check_handle(Kind::Graph, graph)) return CUDA_ERROR_INVALID_HANDLE;
  *exec = new CUgraphExec_st{std::make_shared<Program>(*graph, current_device())};
  note_made(Kind::GraphExec, key_of(*exec));
  return CUDA_SUCCESS;
}

// There is nowhere to upload it to.
API cuGraphUpload(CUgraphExec, CUstream) {
  ENTER(Plain);
  return CUDA_SUCCESS;
}

API cuGraphExecDestroy(CUgraphExec exec) {
  ENTER(Plain);
  Lock lock(state());
  if (!check_handle(Kind::GraphExec, exec)) return CUDA_ERROR_INVALID_HANDLE;
  note_gone(Kind::GraphExec, key_of(exec));
  delete exec;
  return CUDA_SUCCESS;
}

API cuGraphLaunch(CUgraphExec exec, CUstream handle) {
  ENTER(Plain);
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream || !check_handle(Kind::GraphExec, exec)) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return breach(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a graph in a graph is not done here");
  if (CUresult refused = order_with_default(stream)) return refused;
  Program::launch(exec->program, stream);
  return CUDA_SUCCESS;
}

API cuUserObjectCreate(CUuserObject* object, void* data, CUhostFn destroy, unsigned references, unsigned) {
  ENTER(Plain);
  *object = new CUuserObject_st{data, destroy, {references}};
  return CUDA_SUCCESS;
}

API cuUserObjectRetain(CUuserObject object, unsigned references) {
  ENTER(Plain);
  object->references += references;
  return CUDA_SUCCESS;
}

API cuUserObjectRelease(CUuserObject object, unsigned references) {
  ENTER(Plain);
  drop(object, references);
  return CUDA_SUCCESS;
}

API cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned references, unsigned flags) {
  ENTER(Plain);
  Lock lock(state());
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) object->references += references;
  for (unsigned i = 0; i < references; ++i) graph->held.push_back(std::make_shared<Held>(object));
  return CUDA_SUCCESS;
}
