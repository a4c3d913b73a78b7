"""What other trainers and the launcher call their flags, see `mm_utils.doors`."""

FLAGS_OF_OTHERS = {
    "bf16 fp16 tf32 mixed_precision precision amp": (
        "",
        "is ACCELERATE_MIXED_PRECISION=bf16 before the command, or accelerate launch --mixed_precision bf16",
    ),
    "num_processes num_machines multi_gpu gpu_ids": (
        "",
        "goes before the script: accelerate launch --num_processes 4",
    ),
    "config_file": ("", "goes before the script: accelerate launch --config_file FILE"),
    "per_device_train_batch_size per_gpu_train_batch_size train_batch_size batch_size": (
        "global_batch_size",
        "is --global_batch_size here, the pairs of a step over all processes",
    ),
    "gradient_accumulation_steps accum_freq mini_batch_size": (
        "micro_batch_size",
        "is --micro_batch_size here, which bounds memory and leaves the loss exact",
    ),
    "do_train do_eval": ("global_batch_size", "is not needed; the script trains, then evaluates"),
    "eval_strategy evaluation_strategy": ("eval_steps", "is --eval_steps here; 0 evaluates at the end"),
    "save_strategy save_frequency": ("save_steps", "is --save_steps here"),
    "lr": ("learning_rate", "is --learning_rate here"),
    "wd": ("weight_decay", "is --weight_decay here"),
    "warmup warmup_steps": ("warmup_ratio", "is --warmup_ratio here, a share of all steps"),
    "epochs num_epochs": ("num_train_epochs", "is --num_train_epochs here"),
    "workers": ("dataloader_num_workers", "is --dataloader_num_workers here"),
    "train_data": ("train_file", "is --train_file or --dataset_name here"),
    "val_data": ("validation_file", "is --validation_file here"),
    "resume": ("resume_from_checkpoint", "is --resume_from_checkpoint latest here"),
    "siglip": ("objectives", "is --objectives sigmoid:1,matching:1 here"),
    "lock_image": ("freeze_vision", "is --freeze_vision here"),
    "lock_text": ("freeze_text", "is --freeze_text here"),
    "image_column caption_column": ("sources", "belongs to a source: --sources pairs.csv,caption_column=NAME"),
}
"""By names, the flag that a script must have for the advice to hold, and what to write instead."""
