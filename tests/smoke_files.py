"""Training files like those of MindSpore Transformers, for the tests of `smoke`."""

DENSE = """\
run_mode: finetune
load_checkpoint: ''
output_dir: ./output
use_parallel: True
parallel: {parallel_mode: 1, full_batch: True, enable_parallel_optimizer: True}
parallel_config: {data_parallel: 2, model_parallel: 4, pipeline_stage: 2, micro_batch_num: 16}
context: {mode: 0, device_target: Ascend, max_device_memory: 58GB}
runner_config: {batch_size: 4, epochs: 2, gradient_accumulation_steps: 8}
runner_wrapper:
  type: MFTrainOneStepCell
  use_clip_grad: True
  max_grad_norm: 0.5
  scale_sense: {type: DynamicLossScaleUpdateCell, loss_scale_value: 4096, scale_factor: 2, scale_window: 1000}
optimizer: {type: AdamW, betas: [0.9, 0.95], eps: 1.e-6, weight_decay: 0.01}
lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 2.e-5, lr_end: 1.e-6, warmup_ratio: 0.03, total_steps: -1}
recompute_config: {recompute: [5, 3], select_recompute: False}
callbacks: [{type: MFLossMonitor}, {type: CheckpointMonitor, save_checkpoint_steps: 10000, keep_checkpoint_max: 1}]
model:
  arch: {type: LlamaForCausalLM}
  model_config:
    type: LlamaConfig
    num_layers: 28
    hidden_size: 3584
    num_heads: 28
    n_kv_heads: 4
    intermediate_size: 18944
    vocab_size: 152064
    seq_length: 4096
    qkv_has_bias: True
    eos_token_id: [151643, 151645]
    pad_token_id: 151643
    compute_dtype: bfloat16
    softmax_compute_type: float16
    offset: [1, -1]
    theta: 1000000.0
train_dataset: &train
  data_loader: {type: MindDataset, dataset_dir: '', shuffle: True}
  input_columns: [input_ids, target_ids, attention_mask]
train_dataset_task: {type: CausalLanguageModelDataset, dataset_config: *train}
eval_dataset:
  data_loader: {type: MindDataset, dataset_dir: '/nowhere/eval'}
  input_columns: [input_ids, labels]
"""
EXPERTS = """\
use_parallel: True
parallel: {parallel_mode: 1}
parallel_config: {data_parallel: 4, model_parallel: 2, pipeline_stage: 4, expert_parallel: 4, micro_batch_num: 2}
context: {device_target: Ascend}
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 2.e-4, warmup_steps: 2000, total_steps: 2400000}
callbacks:
- {type: TopkBiasBalanceCallback, expert_num: 256, balance_via_topk_bias: True, topk_bias_update_rate: 0.001}
- {type: MoEDropRateCallback, expert_num: 256, capacity_factor: 1.5, num_layers: 60, mtp_depth: 1}
model:
  model_config:
    architectures: [Qwen3MoeForCausalLM]
    num_hidden_layers: 60
    hidden_size: 4096
    num_attention_heads: 64
    num_key_value_heads: 8
    head_dim: 128
    intermediate_size: 12288
    moe_intermediate_size: 1536
    moe_shared_expert_intermediate_size: 3072
    vocab_size: 129280
    seq_length: 4096
    num_nextn_predict_layers: 1
    n_routed_experts: 256
    num_experts_per_tok: 8
    n_group: 8
    topk_group: 4
    scoring_func: sigmoid
    first_k_dense_replace: 3
    moe_router_enable_expert_bias: True
    moe_router_bias_update_rate: 0.001
    capacity_factor: 1.5
train_dataset:
  data_loader:
    type: BlendedMegatronDatasetDataLoader
    sizes: [128000, 0, 0]
    config: {seed: 7, split: '1, 0, 0', seq_length: 4096, eod: 129000, pad: -1, eod_mask_loss: True,
             data_path: ['0.3', /nowhere/a, '0.7', /nowhere/b]}
"""
ALPACA = """\
run_mode: finetune
load_checkpoint: ''
context: {device_target: Ascend}
pretrained_model_dir: /nowhere/Qwen3-32B
train_dataset:
  data_loader:
    type: HFDataLoader
    load_func: load_dataset
    path: json
    data_files: /nowhere/alpaca.json
    split: train
    handler:
    - {type: take, n: 2000}
    - {type: AlpacaInstructDataHandler, seq_length: 4096, tokenizer: {pretrained_model_dir: /nowhere/Qwen3-32B}}
    - {type: PackingHandler, seq_length: 4096, pack_strategy: pack}
"""
