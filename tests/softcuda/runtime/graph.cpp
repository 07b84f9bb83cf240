// Capture and graphs. The runtime's types of these are the driver's, or lie in memory as they do.
#include "runtime.h"

using namespace softcuda_runtime;

API cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return with_context([&] { return cuStreamBeginCapture_v2(stream, static_cast<CUstreamCaptureMode>(mode)); });
}

API cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t* tail,
                                  const cudaGraphEdgeData* edges, size_t count, cudaStreamCaptureMode mode) {
  return with_context([&] {
    return cuStreamBeginCaptureToGraph(stream, graph, tail, reinterpret_cast<const CUgraphEdgeData*>(edges), count,
                                       static_cast<CUstreamCaptureMode>(mode));
  });
}

API cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return with_context([&] { return cuStreamEndCapture(stream, graph); });
}

API cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return with_context([&] { return cuStreamIsCapturing(stream, reinterpret_cast<CUstreamCaptureStatus*>(status)); });
}

API cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                             cudaGraph_t* graph, const cudaGraphNode_t** tail, const cudaGraphEdgeData** edges,
                             size_t* count) {
  return with_context([&] {
    return cuStreamGetCaptureInfo_v3(stream, reinterpret_cast<CUstreamCaptureStatus*>(status),
                                     reinterpret_cast<cuuint64_t*>(id), graph, tail,
                                     reinterpret_cast<const CUgraphEdgeData**>(edges), count);
  });
}

API cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* nodes, const cudaGraphEdgeData* edges,
                                        size_t count, unsigned flags) {
  return with_context([&] {
    return cuStreamUpdateCaptureDependencies_v2(stream, nodes, reinterpret_cast<const CUgraphEdgeData*>(edges), count,
                                                flags);
  });
}

API cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* before, cudaGraphEdgeData* edges,
                                 size_t* count) {
  return result(cuGraphNodeGetDependencies_v2(node, before, reinterpret_cast<CUgraphEdgeData*>(edges), count));
}
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return with_context([&] { return cuThreadExchangeStreamCaptureMode(reinterpret_cast<CUstreamCaptureMode*>(mode)); });
}

API cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  return with_context([&] { return cuGraphInstantiateWithFlags(exec, graph, flags); });
}

API cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}

API cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return with_context([&] { return cuGraphLaunch(exec, stream); });
}

API cudaGraphExecDestroy(cudaGraphExec_t exec) { return result(cuGraphExecDestroy(exec)); }

API cudaGraphDestroy(cudaGraph_t graph) { return result(cuGraphDestroy(graph)); }

API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return result(cuGraphGetNodes(graph, nodes, count));
}

API cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy, unsigned references,
                         unsigned flags) {
  return with_context([&] {
    return cuUserObjectCreate(reinterpret_cast<CUuserObject*>(object), data, destroy, references, flags);
  });
}

API cudaUserObjectRelease(cudaUserObject_t object, unsigned references) {
  return result(cuUserObjectRelease(reinterpret_cast<CUuserObject>(object), references));
}

API cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned references, unsigned flags) {
  return result(cuGraphRetainUserObject(graph, reinterpret_cast<CUuserObject>(object), references, flags));
}
