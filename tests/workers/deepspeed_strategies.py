"""The small model under DeepSpeed's ZeRO stages."""

import torch
import torch.distributed as dist
from strategy import LR, Strategy, make_net


class DeepSpeed(Strategy):
    stage = 0
    offload = False

    def build(self, dtype):
        import logging

        import deepspeed

        deepspeed.utils.logging.logger.setLevel(logging.ERROR)
        # It would compile an extension for inference, behind a lock that outlives a killed process.
        deepspeed.ops.__compatible_ops__ = {}
        self.plain = make_net(dtype)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.micro_steps,
            "zero_optimization": {"stage": self.stage},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if self.offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if dtype == torch.bfloat16:
            config["bf16"] = {"enabled": True}
        groups = [
            {"params": list(self.plain.inner.parameters())},
            {"params": [p for n, p in self.plain.named_parameters() if not n.startswith("inner")]},
        ]
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            model=self.plain, optimizer=torch.optim.AdamW(groups, lr=LR), config=config
        )

    def step(self, micro_batches, poison=None):
        for i, x in enumerate(micro_batches):
            out = self.model(self.share(x).to(self.input_dtype()))
            if poison is not None:
                out = poison(self, out, i)
            self.model.backward(out.float().square().mean())
            if i < len(micro_batches) - 1:
                self.model.step()

    def update(self):
        self.model.step()

    def names(self):
        return dict(self.plain.named_parameters())

    def gathered(self, gradients=True):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

        if self.stage == 0 and self.optimizer.__class__.__name__ == "AdamW":
            return super().gathered(gradients)
        if self.stage == 0:
            return self.copies()
        found = {"parameter": {}, "gradient": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, parameter in self.names().items():
            found["parameter"][name] = safe_get_full_fp32_param(parameter).double().clone()
            if gradients:
                found["gradient"][name] = safe_get_full_grad(parameter).double().clone()
            for key in ("exp_avg", "exp_avg_sq") if self.updates else ():
                if self.stage == 3 or self.stage == 0:
                    found[key][name] = safe_get_full_optimizer_state(parameter, key).double().clone()
                else:
                    found[key][name] = self.whole_state(parameter, key)
        return found

    def copies(self):
        """In bf16 without sharding every rank has a copy of each parameter in fp32; gradients are reduced later."""
        names = {id(p): n for n, p in self.names().items()}
        found = {"parameter": {}, "gradient": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for narrow, wide in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True):
            for parameter, copy in zip(narrow, wide, strict=True):
                found["parameter"][names[id(parameter)]] = copy.detach().double().clone()
                for key, value in self.optimizer.optimizer.state.get(copy, {}).items():
                    if key != "step":
                        found[key][names[id(parameter)]] = value.double().clone()
        return found

    def whole_state(self, parameter, key):
        """Like `safe_get_full_optimizer_state`, whose tables lack the state of the second group's first step."""
        whole = torch.zeros(parameter.numel(), dtype=torch.float64)
        mapping = parameter._hp_mapping
        if mapping is not None:
            flat = self.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            part = self.optimizer.optimizer.state[flat][key].double().narrow(0, here.start, here.numel)
            whole.narrow(0, there.start, there.numel).copy_(part)
        dist.all_reduce(whole)
        return whole.reshape(parameter.shape)


class Zero1(DeepSpeed):
    stage = 1


class Zero2(DeepSpeed):
    stage = 2


class Zero3(DeepSpeed):
    stage = 3


class Zero2Offload(Zero2):
    offload = True
