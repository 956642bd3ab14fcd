"Facts about a model with adapters, grown from one layer of each kind, are those of the whole model."
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
EXPERTS = dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8,
              qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
LINEAR = dict(shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
HYBRID = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, vocab_size=128, num_mem_blocks=1, layers_block_type=["mamba", "hybrid"] * 3,
              mamba_d_state=8, n_mamba_heads=4, mamba_ngroups=1)
ALIKE = [0] * 6
MODELS = { # configuration's class -> (its values, kinds of the six layers; None: nothing is cut)
    "Llama": (SMALL, ALIKE), "Qwen2": (SMALL | dict(tie_word_embeddings=True), ALIKE), "GPT2": (dict(n_embd=32, n_layer=6, n_head=4, vocab_size=128), ALIKE),
    "GPTNeoX": ({k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, ALIKE), "Gemma2": (SMALL | dict(head_dim=8), ALIKE), "Gemma3Text": (SMALL | dict(head_dim=8), ALIKE),
    "Mixtral": (SMALL, ALIKE), "GptOss": (SMALL | dict(head_dim=8, num_local_experts=4), ALIKE), "Phi": (SMALL, ALIKE),
    "Qwen3Moe": (SMALL | EXPERTS | dict(mlp_only_layers=[0, 1]), [0, 0, 1, 1, 1, 1]), "DeepseekV3": (SMALL | LATENT | dict(first_k_dense_replace=2), [0, 0, 1, 1, 1, 1]),
    "Qwen3Next": (SMALL | EXPERTS | LINEAR, [0, 0, 0, 1, 0, 0]), "Llama4Text": (SMALL | dict(head_dim=8, num_local_experts=2, interleave_moe_layer_step=2, intermediate_size_mlp=64), [0, 1, 0, 2, 0, 1]),
    "Zamba2": (HYBRID, None), # its attention blocks share weights
}


def facts(folder, monkeypatch, cut=True, **kw):
    "(facts, what was cut)"
    from shardnb.run import planner
    seen, plain = [], planner._cut
    with monkeypatch.context() as m:
        m.setattr(planner, "_cut", lambda model: seen.append(plain(model) if cut else None) or seen[-1])
        return planner.model_facts(str(folder), **kw), seen


@pytest.mark.parametrize("name", MODELS)
def test_a_grown_model_is_the_whole_one(name, tmp_path, monkeypatch):
    import transformers
    values, kinds = MODELS[name]
    getattr(transformers, f"{name}Config")(**values).save_pretrained(tmp_path)
    grown, seen = facts(tmp_path, monkeypatch, tuning="lora", lora_r=4)
    assert grown == facts(tmp_path, monkeypatch, cut=False, tuning="lora", lora_r=4)[0]
    assert [c and c[1] for c in seen] == [kinds]
    assert 0 < grown["trainable"] < grown["total"] and grown["trainable"] == sum(p[1] for p in grown["params"] if "lora_" in p[0])


@pytest.mark.parametrize("kw", [dict(fsdp_wrap=["LlamaMLP"]), dict(fsdp_keep=["embed_tokens"]), dict(lora_target_modules=["layers.1.mlp.up_proj"]), dict(lora_target_modules=r".*\.1\.mlp\.up_proj")])
def test_nothing_is_cut_where_layers_may_be_told_apart(kw, tmp_path, monkeypatch):
    import transformers
    transformers.LlamaConfig(**SMALL).save_pretrained(tmp_path)
    found, seen = facts(tmp_path, monkeypatch, tuning="lora", **kw)
    assert not seen and found["num_hidden_layers"] == 6
    if "lora_target_modules" in kw: assert {p[3] for p in found["params"] if p[2]} == {"layers.1"}


def test_full_tuning_builds_the_whole_model(tmp_path, monkeypatch):
    import transformers
    transformers.LlamaConfig(**SMALL).save_pretrained(tmp_path)
    found, seen = facts(tmp_path, monkeypatch)
    assert not seen and found["trainable"] == found["total"]
