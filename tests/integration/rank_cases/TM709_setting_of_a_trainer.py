# ranks: 2  culprit: any
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def build():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, max_position_embeddings=8, num_key_value_heads=2, **sizes))


checkpoints = {
    "use_reentrant": True,  # <- cause  # twin: "use_reentrant": False,
}
arguments = TrainingArguments(
    output_dir="out",
    max_steps=4,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    ddp_backend="gloo",
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs=checkpoints,
    ddp_find_unused_parameters=checkpoints["use_reentrant"],
)
rows = [{"input_ids": [i % 20, (i + 1) % 20], "labels": [i % 20, (i + 1) % 20]} for i in range(64)]
Trainer(model=build(), args=arguments, train_dataset=rows).train()
