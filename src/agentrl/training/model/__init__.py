"""Models: from a folder into memory, their predictions, and back to a folder.

model_folder.py, safetensors_folder.py   a Hugging Face folder, read and written
written_form.py, weight_files.py         what is written, after the example of the start folder
loading.py, value_loading.py             weights into a model that is sharded already
lora.py                                  a low-rank adapter
prepare.py                               a model divided over processes, with its heads
noise.py                                 a model without dropout
logprobs.py, head.py, softmax.py         logprobs and entropy of given tokens, in chunks
own_logits.py                            logits as the model's own forward computes them
batch_form.py                            the form in which a model takes micro-batches
value_head.py                            a critic's values
weight_gathering.py                      the weights of all processes on rank 0, beside training
export.py                                a checkpoint as a folder that services load
text_sizes.py                            heads, units and experts, by a configuration's own names
memory_model.py, memory_report.py        what a step takes of a device's memory
"""
