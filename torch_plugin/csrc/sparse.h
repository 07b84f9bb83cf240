// all_reduce of sparse tensors, made of all_gathers.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

namespace ncclx {

// Replaces a COO tensor by the sum over all ranks. It blocks, also for asynchronous calls: the lengths of the later
// messages depend on the first one, each rank's number of entries.
inline void sum_sparse(c10d::Backend& group, at::Tensor& tensor, std::chrono::milliseconds timeout) {
  const at::Tensor mine = tensor.coalesce();
  const at::Tensor indices = mine.indices().contiguous();
  const at::Tensor values = mine.values().contiguous();
  c10d::AllgatherOptions opts;
  opts.timeout = timeout;
  opts.asyncOp = false;
  at::Tensor own_count = at::full({1}, mine._nnz(), at::kLong);
  at::Tensor counts = at::empty({group.getSize()}, at::kLong);
  group._allgather_base(counts, own_count, opts)->wait();
  std::vector<at::Tensor> all_indices;
  std::vector<at::Tensor> all_values;
  for (int rank = 0; rank < group.getSize(); ++rank) {
    const int64_t count = counts[rank].item<int64_t>();
    all_indices.push_back(at::empty({indices.size(0), count}, indices.options()));
    auto shape = values.sizes().vec();
    shape[0] = count;
    all_values.push_back(at::empty(shape, values.options()));
  }
  auto gather = [&](std::vector<at::Tensor>& all, const at::Tensor& own) {
    std::vector<std::vector<at::Tensor>> outputs{all};
    std::vector<at::Tensor> inputs{own};
    group.allgather(outputs, inputs, opts)->wait();
  };
  gather(all_indices, indices);
  gather(all_values, values);
  tensor.copy_(at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values, 0), tensor.sizes()).coalesce());
}

}  // namespace ncclx
