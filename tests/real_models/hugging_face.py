"""Models of Hugging Face transformers, called with keywords, labels and the default cache."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.real_models.case import Built, Case, Sizes, images, labels_of_classes, mask, tokens

BOTH = ("sdpa", "eager")
SINGLE = 1e-5  # losses cast logits to float32; so do rotary embeddings, norms and routers


def transformers() -> Any:
    """Return the package; it imports a model when it is asked for."""
    return importlib.import_module("transformers")


def make(name: str, config: str, attention: str, **options: Any) -> Any:
    """Return a model of the package by its class's and its config's name."""
    made = getattr(transformers(), config)(**options)
    if attention:
        made._attn_implementation = attention
    return getattr(transformers(), name)(made)


def causal(name: str, config: str, **more: Any) -> Any:
    """Return a builder of a decoder whose config has the names that most have; a callable gets the sizes."""

    def build(s: Sizes, attention: str) -> Built:
        options: dict[str, Any] = {
            "vocab_size": s.vocabulary, "hidden_size": s.hidden, "num_hidden_layers": 1, "num_attention_heads": s.heads,
            "num_key_value_heads": s.groups, "intermediate_size": s.wide, "max_position_embeddings": 16,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        options |= {key: value(s) if callable(value) else value for key, value in more.items()}
        options = {key: value for key, value in options.items() if value is not None}
        return make(name, config, attention, **options), (), {"input_ids": tokens(s), "attention_mask": mask(s), "labels": tokens(s)}

    return build


def gpt2(s: Sizes, attention: str) -> Built:
    options = {"n_positions": 16, "n_embd": s.hidden, "n_layer": 1, "n_head": s.heads, "bos_token_id": 1, "eos_token_id": 2}
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    model = make("GPT2LMHeadModel", "GPT2Config", attention, vocab_size=s.vocabulary, **options, **drops)
    ids = tokens(s)
    return model, (), {"input_ids": ids, "labels": ids}


def gptj(s: Sizes, attention: str) -> Built:
    options = {"n_positions": 16, "n_embd": s.hidden, "n_layer": 1, "n_head": s.heads, "rotary_dim": 4}
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    model = make("GPTJForCausalLM", "GPTJConfig", attention, vocab_size=s.vocabulary, bos_token_id=1, eos_token_id=2, **options, **drops)
    return model, (), {"input_ids": tokens(s), "attention_mask": mask(s), "labels": tokens(s)}


def bloom(s: Sizes, attention: str) -> Built:
    options = {"hidden_size": s.hidden, "n_layer": 1, "n_head": s.heads, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    model = make("BloomForCausalLM", "BloomConfig", attention, vocab_size=s.vocabulary, bos_token_id=1, eos_token_id=2, **options)
    return model, (), {"input_ids": tokens(s), "attention_mask": mask(s), "labels": tokens(s)}


def encoder(name: str, config: str, **more: Any) -> Any:
    """Return a builder of an encoder of BERT's kind; `classify` gives it classes for labels."""

    def build(s: Sizes, attention: str) -> Built:
        classify = "Sequence" in name
        options: dict[str, Any] = {
            "vocab_size": s.vocabulary, "hidden_size": s.hidden, "num_hidden_layers": 1, "num_attention_heads": s.heads,
            "intermediate_size": s.wide, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0, "pad_token_id": 0, "num_labels": s.classes,
        }  # fmt: skip
        options |= {key: value(s) if callable(value) else value for key, value in more.items()}
        labels = labels_of_classes(s) if classify else tokens(s)
        return make(name, config, attention, **options), (), {"input_ids": tokens(s), "attention_mask": mask(s), "labels": labels}

    return build


def distilbert(s: Sizes, attention: str) -> Built:
    options = {"dim": s.hidden, "n_layers": 1, "n_heads": s.heads, "hidden_dim": s.wide, "max_position_embeddings": 16}
    drops = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    model = make("DistilBertForMaskedLM", "DistilBertConfig", attention, vocab_size=s.vocabulary, **options, **drops)
    return model, (), {"input_ids": tokens(s), "attention_mask": mask(s), "labels": tokens(s)}


def t5(s: Sizes, attention: str) -> Built:
    options = {"d_model": s.hidden, "d_kv": s.hidden // s.heads, "d_ff": s.wide, "num_layers": 1, "num_heads": s.heads}
    more = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = make("T5ForConditionalGeneration", "T5Config", attention, vocab_size=s.vocabulary, **options, **more)
    return model, (), {"input_ids": tokens(s), "attention_mask": mask(s), "labels": tokens(s, 5)}


def bart(s: Sizes, attention: str) -> Built:
    sides = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _side(s).items()}
    drops = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
    sizes = {"vocab_size": s.vocabulary, "d_model": s.hidden, "max_position_embeddings": 16}
    model = make("BartForConditionalGeneration", "BartConfig", attention, **sizes, **sides, **drops, **special)
    return model, (), {"input_ids": tokens(s), "attention_mask": mask(s), "labels": tokens(s, 5)}


def _side(s: Sizes) -> dict[str, int]:
    return {"layers": 1, "attention_heads": s.heads, "ffn_dim": s.wide}


def whisper(s: Sizes, attention: str) -> Built:
    sides = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _side(s).items()}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    sizes = {
        "vocab_size": s.vocabulary, "d_model": s.hidden, "num_mel_bins": 8, "max_source_positions": s.sequence,
        "max_target_positions": 16, "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    model = make("WhisperForConditionalGeneration", "WhisperConfig", attention, **sizes, **sides, **special)
    sound = torch.randn(s.batch, 8, 2 * s.sequence, generator=torch.Generator().manual_seed(0))
    return model, (), {"input_features": sound, "labels": tokens(s, 5)}


def vision(name: str, config: str, **more: Any) -> Any:
    """Return a builder of a classifier of images."""

    def build(s: Sizes, attention: str) -> Built:
        options: dict[str, Any] = {
            "image_size": s.image, "patch_size": 4, "hidden_size": s.hidden, "num_hidden_layers": 1,
            "num_attention_heads": s.heads, "intermediate_size": s.wide, "num_labels": s.classes,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        }  # fmt: skip
        options |= {key: value(s) if callable(value) else value for key, value in more.items()}
        options = {key: value for key, value in options.items() if value is not None}
        return make(name, config, attention, **options), (), {"pixel_values": images(s), "labels": labels_of_classes(s)}

    return build


def clip(s: Sizes, attention: str) -> Built:
    side = {"hidden_size": s.hidden, "intermediate_size": s.wide, "num_hidden_layers": 1, "num_attention_heads": s.heads}
    text = {**side, "vocab_size": s.vocabulary, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    seen = {**side, "image_size": s.image, "patch_size": 4}
    model = make("CLIPModel", "CLIPConfig", attention, text_config=text, vision_config=seen, projection_dim=s.hidden)
    call = {"input_ids": tokens(s), "attention_mask": mask(s), "pixel_values": images(s), "return_loss": True}
    return model, (), call


def mixtral(experts: str) -> Any:
    """Return a builder of Mixtral with one way of running its experts."""

    def build(s: Sizes, attention: str) -> Built:
        model, args, kwargs = causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2)(s, attention)
        model.config._experts_implementation = experts
        return model, args, {**kwargs, "output_router_logits": True}

    return build


def mamba(s: Sizes, attention: str) -> Built:
    sizes = {"hidden_size": s.hidden, "num_hidden_layers": 1, "state_size": 4, "intermediate_size": 2 * s.hidden, "time_step_rank": 2}
    model = make("MambaForCausalLM", "MambaConfig", "", vocab_size=s.vocabulary, **sizes)
    return model, (), {"input_ids": tokens(s), "labels": tokens(s)}


_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_ROPE = {"head_dim": lambda s: s.hidden // s.heads}
CASES = {
    "GPT-2": Case(gpt2, BOTH, SINGLE),
    "Llama": Case(causal("LlamaForCausalLM", "LlamaConfig"), BOTH, SINGLE),
    "Mistral": Case(causal("MistralForCausalLM", "MistralConfig", sliding_window=4, head_dim=None), BOTH, SINGLE),
    "Qwen2": Case(causal("Qwen2ForCausalLM", "Qwen2Config"), BOTH, SINGLE),
    "Qwen3": Case(causal("Qwen3ForCausalLM", "Qwen3Config", **_ROPE), BOTH, SINGLE),
    "Phi": Case(causal("PhiForCausalLM", "PhiConfig", embd_pdrop=0.0, resid_pdrop=0.0, attention_dropout=0.0), BOTH, SINGLE),
    "Gemma": Case(causal("GemmaForCausalLM", "GemmaConfig", **_ROPE), BOTH, SINGLE),
    "Gemma2": Case(causal("Gemma2ForCausalLM", "Gemma2Config", sliding_window=4, **_ROPE), ("eager",), SINGLE),
    "BLOOM": Case(bloom, ("",), SINGLE),
    "GPT-NeoX": Case(causal("GPTNeoXForCausalLM", "GPTNeoXConfig", num_key_value_heads=None), BOTH, SINGLE),
    "GPT-J": Case(gptj, ("eager",), SINGLE),
    "OPT": Case(
        causal("OPTForCausalLM", "OPTConfig", ffn_dim=lambda s: s.wide, word_embed_proj_dim=lambda s: s.hidden, dropout=0.0),
        BOTH, SINGLE, rounding="*.k_proj.bias",
    ),
    "Falcon": Case(causal("FalconForCausalLM", "FalconConfig"), BOTH, SINGLE),
    "BERT (masked)": Case(encoder("BertForMaskedLM", "BertConfig"), BOTH, SINGLE),
    "BERT (classes)": Case(encoder("BertForSequenceClassification", "BertConfig"), BOTH, SINGLE),
    "RoBERTa": Case(encoder("RobertaForMaskedLM", "RobertaConfig"), BOTH, SINGLE),
    "DistilBERT": Case(distilbert, BOTH, SINGLE),
    "ALBERT": Case(encoder("AlbertForMaskedLM", "AlbertConfig", num_hidden_layers=2, embedding_size=lambda s: s.hidden // 2), BOTH, SINGLE),
    "DeBERTa": Case(encoder("DebertaForMaskedLM", "DebertaConfig", **_RELATIVE), ("",), SINGLE),
    "DeBERTa v2": Case(encoder("DebertaV2ForMaskedLM", "DebertaV2Config", **_RELATIVE), ("",), SINGLE),
    "ELECTRA": Case(encoder("ElectraForMaskedLM", "ElectraConfig", embedding_size=lambda s: s.hidden // 2), BOTH, SINGLE),
    "T5": Case(t5, ("",), SINGLE),
    "BART": Case(bart, BOTH, SINGLE),
    "Whisper": Case(whisper, BOTH, SINGLE),
    "ViT": Case(vision("ViTForImageClassification", "ViTConfig"), BOTH, SINGLE),
    "DeiT": Case(vision("DeiTForImageClassification", "DeiTConfig"), BOTH, SINGLE),
    "Swin": Case(
        vision(
            "SwinForImageClassification", "SwinConfig", embed_dim=lambda s: s.hidden // 2, depths=[2], num_heads=lambda s: [s.heads // 2],
            patch_size=2, window_size=2, drop_path_rate=0.0, num_attention_heads=None, hidden_size=None, num_hidden_layers=None,
        ),
        ("",), SINGLE,
    ),
    "CLIP": Case(clip, BOTH, SINGLE),
    "Mixtral (batched)": Case(mixtral("batched_mm"), BOTH, SINGLE),
    "Mixtral (grouped)": Case(mixtral("grouped_mm"), ("sdpa",), SINGLE, dtype=torch.float32),
    "Mixtral (eager)": Case(mixtral("eager"), ("sdpa",), SINGLE, refused="depend on shapes only"),
    "Mamba": Case(mamba, ("",), SINGLE),
}  # fmt: skip
