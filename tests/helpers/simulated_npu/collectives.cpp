// The simulated device's backend of torch.distributed: gloo on copies in host memory, as a device's own library reads
// its own memory. The work is done when the call returns.

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using c10::intrusive_ptr;
using c10d::Work;

class Done final : public Work {
 public:
  Done(c10d::OpType op, Tensors results) : Work(-1, op), results_(std::move(results)) {
    std::vector<c10::Device> devices;
    if (!results_.empty()) devices.push_back(results_[0].device());
    future_ = c10::make_intrusive<at::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future_->markCompleted(at::IValue(results_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return results_; }
  intrusive_ptr<at::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors results_;
  intrusive_ptr<at::ivalue::Future> future_;
};

Tensors host(const Tensors& xs) {
  Tensors out;
  for (auto& x : xs) out.push_back(x.to(at::kCPU));
  return out;
}

class Hccl final : public c10d::Backend {
 public:
  explicit Hccl(intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }

  intrusive_ptr<Work> allreduce(Tensors& xs, const c10d::AllreduceOptions& options) override {
    auto here = host(xs);
    auto asked = options;
    bool average = asked.reduceOp == c10d::ReduceOp::AVG;
    if (average) asked.reduceOp = c10d::ReduceOp::SUM;
    gloo_->allreduce(here, asked)->wait();
    return back(xs, here, c10d::OpType::ALLREDUCE, average);
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& x : xs) {
      Tensors one{x};
      allreduce(one, options);
    }
    return done(xs, c10d::OpType::ALLREDUCE_COALESCED);
  }
  intrusive_ptr<Work> broadcast(Tensors& xs, const c10d::BroadcastOptions& options) override {
    auto here = host(xs);
    gloo_->broadcast(here, options)->wait();
    return back(xs, here, c10d::OpType::BROADCAST, false);
  }
  intrusive_ptr<Work> reduce(Tensors& xs, const c10d::ReduceOptions& options) override {
    auto here = host(xs);
    gloo_->reduce(here, options)->wait();
    return back(xs, here, c10d::OpType::REDUCE, false);
  }
  intrusive_ptr<Work> allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> here;
    for (auto& one : out) here.push_back(host(one));
    auto from = host(in);
    gloo_->allgather(here, from, options)->wait();
    for (size_t i = 0; i < out.size(); i++) write(out[i], here[i]);
    return done(out.at(0), c10d::OpType::ALLGATHER);
  }
  intrusive_ptr<Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions&) override {
    auto from = in.to(at::kCPU).contiguous();
    std::vector<Tensors> parts(1);
    for (int i = 0; i < getSize(); i++) parts[0].push_back(at::empty_like(from));
    Tensors one{from};
    gloo_->allgather(parts, one, c10d::AllgatherOptions())->wait();
    out.copy_(at::cat([&] { Tensors flat; for (auto& p : parts[0]) flat.push_back(p.reshape(-1)); return flat; }()).view(out.sizes()));
    return done({out}, c10d::OpType::_ALLGATHER_BASE);
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < out.size(); i++) _allgather_base(out[i], in[i], options);
    return done(out, c10d::OpType::COALESCED);
  }
  intrusive_ptr<Work> _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto sum = in.to(at::kCPU).contiguous();
    c10d::AllreduceOptions asked;
    bool average = options.reduceOp == c10d::ReduceOp::AVG;
    asked.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
    Tensors one{sum};
    gloo_->allreduce(one, asked)->wait();
    auto part = sum.reshape(-1).chunk(getSize())[getRank()];
    out.copy_((average ? part / getSize() : part).reshape(out.sizes()));
    return done({out}, c10d::OpType::_REDUCE_SCATTER_BASE);
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < out.size(); i++) _reduce_scatter_base(out[i], in[i], options);
    return done(out, c10d::OpType::COALESCED);
  }
  intrusive_ptr<Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from,
                                    const c10d::AllToAllOptions& options) override {
    auto there = out.to(at::kCPU), here = in.to(at::kCPU);
    gloo_->alltoall_base(there, here, to, from, options)->wait();
    out.copy_(there);
    return done({out}, c10d::OpType::ALLTOALL_BASE);
  }
  intrusive_ptr<Work> send(Tensors& xs, int to, int tag) override {
    auto here = host(xs);
    gloo_->send(here, to, tag)->wait();
    return done(xs, c10d::OpType::SEND);
  }
  intrusive_ptr<Work> recv(Tensors& xs, int from, int tag) override {
    auto here = host(xs);
    gloo_->recv(here, from, tag)->wait();
    return back(xs, here, c10d::OpType::RECV, false);
  }
  intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override {
    gloo_->barrier()->wait();
    return done({}, c10d::OpType::BARRIER);
  }

 private:
  static void write(Tensors& to, const Tensors& from) {
    for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i]);
  }
  static intrusive_ptr<Work> done(Tensors xs, c10d::OpType op) { return c10::make_intrusive<Done>(op, std::move(xs)); }
  intrusive_ptr<Work> back(Tensors& xs, Tensors& here, c10d::OpType op, bool average) {
    if (average) for (auto& x : here) x.div_(getSize());
    write(xs, here);
    return done(xs, op);
  }
  intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(collectives, m) {
  py::class_<Hccl, c10d::Backend, intrusive_ptr<Hccl>>(m, "Hccl").def(py::init<intrusive_ptr<c10d::Backend>>());
}
