"""What Hugging Face's `generate` answers to a dozen questions, greedily, in fp32, from the default model's file.

The oracle of the runtime and of the server alike; computed once for a test run.
"""

import functools
from typing import NamedTuple

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue to a child.",
    "List three tips for learning to cook.",
    "Translate 'good morning' into Spanish and use it in a sentence.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Write a Python function that adds two numbers.",
    "What is photosynthesis?",
    "Tell me a story about a brave mouse.",
    "How do I stay healthy?",
    "What is 12 times 12? Explain the steps.",
)
N_TOKENS = 64  # of each answer, whatever they are


class Answer(NamedTuple):
    question: str
    prompt: list[int]  # as the model's chat template writes it
    tokens: list[int]
    text: str


@functools.cache  # tens of seconds and 0.6 GB, for all tests that need it
def load_hugging_face(path):
    """Model in fp32 and tokenizer, both read from a GGUF file by transformers. Shared: to be read only."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@functools.cache
def greedy_answers(path):
    """One Answer for each question."""
    import torch

    model, tokenizer = load_hugging_face(path)
    answers = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=N_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens = out[0, ids.shape[1] :].tolist()
        answers.append(Answer(question, ids[0].tolist(), tokens, tokenizer.decode(tokens, skip_special_tokens=True)))
    return tuple(answers)
