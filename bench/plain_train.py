"""The job of `bench/start.py` as a plain torchrun script: TRL's trainer and one engine, without shardnb. It writes the time at which its first optimizer step ended.

    torchrun --nproc-per-node 2 bench/plain_train.py STRATEGY MODEL ROWS OUT
"""
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

strategy, model, rows, out = sys.argv[1:]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

engine = {}
if strategy.startswith("zero"):
    import deepspeed
    import deepspeed.ops
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for half a minute
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    deepspeed.init_distributed(dist_backend="gloo")
    engine["deepspeed"] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
                           "zero_optimization": {"stage": int(strategy[4])}, "zero_allow_untested_optimizer": True}
elif strategy == "fsdp":
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    PartialState(backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # on CPU ranks Accelerate falls back to DDP otherwise
    engine = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
              "accelerator_config": {"use_configured_state": True}}


class First(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        if state.global_step == 1 and dist.get_rank() == 0: Path(out).write_text(str(time.time()))


args = SFTConfig(output_dir=out + ".checkpoints", per_device_train_batch_size=1, max_steps=2, max_length=256, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, optim="adamw_torch",
                 bf16=False, gradient_checkpointing=False, disable_tqdm=True, assistant_only_loss=True, **engine)
tokenizer = AutoTokenizer.from_pretrained(model)
net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
data = Dataset.from_list([json.loads(line) for line in Path(rows).read_text().splitlines()])
trainer = SFTTrainer(model=net, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[First()])
trainer.train()
assert {"ddp": "DistributedDataParallel", "fsdp": "FSDP"}.get(strategy, "DeepSpeed") in type(trainer.model_wrapped).__name__, type(trainer.model_wrapped)
os._exit(0)  # as shardnb's ranks do: leaving in order takes seconds with DeepSpeed loaded
