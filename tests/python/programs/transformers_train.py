"""Trains a small Llama with random weights by Transformers' Trainer, which takes gloo on CPUs."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
text = [torch.arange(i, i + 16) % 64 for i in range(64)]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    use_cpu=True,
    max_steps=3,
    logging_steps=1,
    per_device_train_batch_size=8,
    learning_rate=0.01,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
assert arguments.world_size == 2, arguments.world_size
trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": t, "labels": t} for t in text])
trainer.train()
if arguments.process_index == 0:
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"loss: {float(entry['loss']):.6f}", flush=True)
