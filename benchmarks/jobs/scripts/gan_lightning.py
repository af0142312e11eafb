from data import digit_tensors, likeness

images, *_ = digit_tensors()

# --- job ---
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader


class Gan(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def training_step(self, images, batch_idx):
        generator_optimizer, discriminator_optimizer = self.optimizers()
        real, fake = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        fakes = self.generator(torch.randn(len(images), 16))
        loss = binary_cross_entropy_with_logits(self.discriminator(fakes), real)
        generator_optimizer.zero_grad()
        self.manual_backward(loss)
        generator_optimizer.step()
        on_real, on_fakes = self.discriminator(images), self.discriminator(fakes.detach())
        real_loss = binary_cross_entropy_with_logits(on_real, real)
        fake_loss = binary_cross_entropy_with_logits(on_fakes, fake)
        discriminator_optimizer.zero_grad()
        self.manual_backward(real_loss + fake_loss)
        discriminator_optimizer.step()

    def configure_optimizers(self):
        return (
            optim.Adam(self.generator.parameters(), 1e-3, betas=(0.5, 0.999)),
            optim.Adam(self.discriminator.parameters(), 1e-3, betas=(0.5, 0.999)),
        )


gan = Gan()
Trainer(max_epochs=60).fit(gan, DataLoader(images, batch_size=64, shuffle=True))
print("likeness:", likeness(gan.generator))
