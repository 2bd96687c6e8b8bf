"""Another engine in a process of its own: reads questions as JSON lines and answers what they took.

    PYTHON peer_child.py transformers|openvino|openvino-batch MODEL.gguf THREADS

It runs under the Python that has the engine, so it imports nothing of this project. A question is
{"prompts": [text or messages, ...], "tokens": how many to write}; the answer has the seconds to the first
token, the seconds in all, and the tokens that were written.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Question = dict[str, Any]
Answer = dict[str, float]


class FirstToken:
    """A streamer for transformers that notes when the first token comes."""

    def __init__(self) -> None:
        self.calls = 0
        self.first = 0.0

    def put(self, value: object) -> None:
        """Called with the prompt, then with each token."""
        self.calls += 1
        if self.calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to do."""


def transformers(path: str, threads: int) -> Callable[[Question], Answer]:
    """Hugging Face's generate() in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    folder, file = os.path.split(path)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()

    def answer(question: Question) -> Answer:
        [prompt] = question["prompts"]
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
        else:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        count, streamer = question["tokens"], FirstToken()
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                streamer=streamer,
            )
        seconds = time.perf_counter() - began
        return {"first": streamer.first - began, "seconds": seconds, "tokens": out.shape[1] - ids.shape[1]}

    return answer


def openvino(path: str, threads: int) -> Callable[[Question], Answer]:
    """OpenVINO GenAI, one prompt at a time."""
    genai = importlib.import_module("openvino_genai")

    pipe = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
    tokenizer = pipe.get_tokenizer()

    def answer(question: Question) -> Answer:
        texts = [_text(tokenizer, prompt) for prompt in question["prompts"]]
        began = time.perf_counter()
        metrics = pipe.generate(texts, _config(genai, question["tokens"])).perf_metrics
        seconds = time.perf_counter() - began
        return {
            "first": metrics.get_ttft().mean / 1000,
            "seconds": seconds,
            "tokens": metrics.get_num_generated_tokens(),
        }

    return answer


def openvino_batch(path: str, threads: int) -> Callable[[Question], Answer]:
    """OpenVINO GenAI's continuous batching."""
    genai = importlib.import_module("openvino_genai")

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    pipe = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
    tokenizer = pipe.get_tokenizer()

    def answer(question: Question) -> Answer:
        texts = [_text(tokenizer, prompt) for prompt in question["prompts"]]
        began = time.perf_counter()
        pipe.generate(texts, [_config(genai, question["tokens"]) for _ in texts])
        # The end of the text is ignored, so all were written.
        return {
            "first": 0.0,
            "seconds": time.perf_counter() - began,
            "tokens": question["tokens"] * len(texts),
        }

    return answer


def _config(genai: Any, tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


def _text(tokenizer: Any, prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True))


ENGINES = {"transformers": transformers, "openvino": openvino, "openvino-batch": openvino_batch}


def main() -> None:
    """Answers until the questions end."""
    # Libraries print what they like to stdout; answers go where it pointed.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = ENGINES[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
