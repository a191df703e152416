"""Hugging Face's Trainer on the ranks of a pool: it wraps the model in DistributedDataParallel."""

import torch
import torch.distributed as dist


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def train(out, folder, steps, broken_at=None):
    """Train; a weight of rank 1 breaks before step `broken_at`. Return the last step and why the training stopped."""
    import transformers

    from trainsentry.integrations import HFCallback

    class Break(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            if state.global_step == broken_at and dist.get_rank() == 1:
                model.transformer.h[0].mlp.c_fc.weight.data[0, 0] = torch.nan

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=8)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, report_to=[], use_cpu=True, ddp_backend="gloo",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    callback = HFCallback({"output_dir": str(out), "strict": True, "on_incident": {"stop": True}})
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), callbacks=[callback, Break()]
    )
    trainer.train()
    return trainer.state.global_step, None if callback.stopped is None else callback.stopped.reason
